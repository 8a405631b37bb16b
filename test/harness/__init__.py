"""What the tests share: real engines and servers on tiny checkpoints, each started once."""
