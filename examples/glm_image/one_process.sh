#!/usr/bin/env bash
# (a) Everything in one server; more GPUs by DIFFUSION_FLAGS.
. "$(dirname "$0")/common.sh"
exec sglang serve --model-path "$MODEL" --guidance-buckets 8 --port "$PORT" "${diffusion_flags[@]}"
