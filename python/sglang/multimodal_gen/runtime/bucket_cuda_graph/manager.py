# SPDX-License-Identifier: Apache-2.0
"""`BucketGraphs`: the graphs of one DiT; which step replays which, what is captured and dropped."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from sglang.multimodal_gen.configs.bucket_graphs import BucketGraphConfig
from sglang.multimodal_gen.runtime.bucket_cuda_graph.buckets import (
    GraphBucket,
    GraphShape,
    cheapest_rows,
    row_bucket,
    text_bucket,
)
from sglang.multimodal_gen.runtime.bucket_cuda_graph.budget import GraphBudget
from sglang.multimodal_gen.runtime.bucket_cuda_graph.demand import Demand
from sglang.multimodal_gen.runtime.bucket_cuda_graph.graph import (
    BucketGraph,
    MemoryMeter,
    capture,
)
from sglang.multimodal_gen.runtime.bucket_cuda_graph.inputs import GraphSample, StaticInputs
from sglang.multimodal_gen.runtime.bucket_cuda_graph.recorder import Recorder
from sglang.multimodal_gen.runtime.guidance.rows import RowAdapter, rows_pack
from sglang.multimodal_gen.runtime.guidance.rows.base import BranchKwargs
from sglang.multimodal_gen.runtime.utils.logging_utils import init_logger

logger = init_logger(__name__)

_random_serials = itertools.count(-1, -1)  # requests count upwards from 0


class GraphRefused(RuntimeError):
    """A bucket gets no graph; the message says why."""


@dataclass(frozen=True)
class Prediction:
    """What a replay computed for one sample.

    Attributes:
        combined: ``[images, ...]`` in fp32, at the step's scale.
        cond, uncond: ``[images, ...]``, the DiT's own output, where it was asked for; the same
            rows where the sample is unguided.
    """

    combined: torch.Tensor
    cond: torch.Tensor | None = None
    uncond: torch.Tensor | None = None


class BucketGraphs:
    """Used by one thread, the scheduler's, between and inside steps."""

    def __init__(
        self,
        *,
        adapter: RowAdapter,
        config: BucketGraphConfig,
        guidance_rows: str,
        dtype: torch.dtype,
        text_dtypes: Sequence[torch.dtype],
        device: torch.device,
        forward: Callable[[StaticInputs, int], tuple[torch.Tensor, torch.Tensor]],
        context: Callable[[], AbstractContextManager],
        mount: Callable[[str], None],
        recorder: Recorder,
        budget_bytes: int,
    ):
        """
        Args:
            guidance_rows: ``--guidance-rows``.
            dtype: of the DiT and of the latents that go into it.
            text_dtypes: of what each text encoder gives.
            forward: static inputs and a row count to the prediction of each row and the combine.
            context: entered around a replay, as `forward` enters it around its forward.
            mount: puts the kernel fusions of a quality level on the DiT.
        """
        self.adapter = adapter
        self.config = config
        self.guidance_rows = guidance_rows
        self.dtype = dtype
        self.text_dtypes = text_dtypes
        self.device = device
        self.forward = forward
        self.context = context
        self.mount = mount
        self.recorder = recorder
        self.meter = MemoryMeter(device)
        self.budget = GraphBudget(budget_bytes)
        self.demand = Demand()
        self.graphs: dict[GraphBucket, BucketGraph] = {}
        self.refused: dict[GraphBucket, str] = {}
        self.misses: Counter[str] = Counter()
        self.replays: Counter[str] = Counter()  # by label; graphs come and go, counts stay
        self.padding_rows: Counter[str] = Counter()
        self.padding = 0  # rows of the last step
        self._inputs: dict[GraphShape, StaticInputs] = {}
        self._tokens: dict[tuple[int, ...], int] = {}
        self._weights_at: int | None = None

    # --- which bucket ---------------------------------------------------------------------------

    def shape_for(
        self, latent_shape: tuple[int, ...], quality: str, groups: Iterable[dict]
    ) -> GraphShape | None:
        """The shape whose graphs hold these row groups; None where their texts fit none."""
        groups = list(groups)
        text = text_bucket(
            (self.adapter.text_of(kwargs).shape[1] for kwargs in groups),
            has_mask=any(self.adapter.group_mask(kwargs) is not None for kwargs in groups),
            unpadded_length=self.adapter.unpadded_text_length,
            text_lengths=self.config.text_lengths,
            can_mask=self._can_mask(latent_shape),
        )
        if text is None:
            return None
        return self._shape(latent_shape, *text, quality)

    def _shape(
        self, latent_shape: tuple[int, ...], text_length: int, masked: bool, quality: str
    ) -> GraphShape:
        return GraphShape(
            latent_shape=tuple(latent_shape),
            text_length=text_length,
            masked=masked,
            dtype=str(self.dtype).removeprefix("torch."),
            quality=quality,
        )

    def _can_mask(self, latent_shape: tuple[int, ...]) -> bool:
        # a mask moves attention off the flash kernel: beyond this size that costs more than a
        # graph saves
        return self.adapter.can_mask and rows_pack(
            "auto" if self.guidance_rows == "split" else self.guidance_rows,
            refusal=None,
            masked=True,
            image_tokens=self._image_tokens(latent_shape),
        )

    def _image_tokens(self, latent_shape: tuple[int, ...]) -> int:
        if latent_shape not in self._tokens:
            latents = torch.empty(1, *latent_shape, device="meta")
            self._tokens[latent_shape] = self.adapter.image_tokens(latents)
        return self._tokens[latent_shape]

    def _token_share(self, shape: GraphShape, samples: Sequence[GraphSample]) -> float:
        if not shape.masked:
            return 1.0
        longest = max(
            self.adapter.text_of(kwargs).shape[1]
            for sample in samples
            for kwargs in sample.branches.values()
        )
        image_tokens = self._image_tokens(shape.latent_shape)
        return (image_tokens + longest) / (image_tokens + shape.text_length)

    def _row_buckets(self, shape: GraphShape) -> tuple[int, ...]:
        return self.config.rows_for(self._image_tokens(shape.latent_shape))

    def declared(self, latent_shapes: Iterable[tuple[int, ...]], quality: str) -> list[GraphBucket]:
        """Every bucket of these resolutions, largest first."""
        buckets = []
        for latent_shape in latent_shapes:
            texts = []
            if self.adapter.unpadded_text_length is not None:
                texts.append((self.adapter.unpadded_text_length, False))
            # a family whose texts all have one length never needs the others
            if self.adapter.pads_text and self._can_mask(latent_shape):
                texts += [(length, True) for length in self.config.text_lengths]
            for text_length, masked in texts:
                shape = self._shape(latent_shape, text_length, masked, quality)
                buckets += [
                    GraphBucket(shape=shape, rows=rows) for rows in self._row_buckets(shape)
                ]
        return sorted(buckets, key=self._size, reverse=True)

    def _size(self, bucket: GraphBucket) -> tuple[int, GraphBucket]:
        tokens = self._image_tokens(bucket.shape.latent_shape) + bucket.shape.text_length
        return bucket.rows * tokens, bucket

    # --- a step ---------------------------------------------------------------------------------

    def predict(
        self, samples: Sequence[GraphSample], quality: str, *, branches: bool = False
    ) -> list[Prediction] | None:
        """Replay the step of these samples, which share a forward; None where it runs eagerly.

        Args:
            branches: whether `Prediction.cond` and `Prediction.uncond` are wanted.
        """
        self.padding = 0
        latent_shape = tuple(samples[0].latents.shape[1:])
        groups = [kwargs for sample in samples for kwargs in sample.branches.values()]
        shape = self.shape_for(latent_shape, quality, groups)
        rows = sum(sample.rows.rows for sample in samples)
        wanted = shape and self._bucket_of(shape, rows)
        predictions = None
        if wanted is None:
            self._miss("too many rows" if shape else "text length")
        else:
            predictions = self._predict_in(shape, rows, samples, branches)
        self.demand.add(wanted, replayed=predictions is not None)
        return predictions

    def count_alone(self) -> None:
        """Account for a step that takes a way of its own, without a graph."""
        self.padding = 0
        self._miss("runs alone")
        self.demand.add(None, replayed=False)

    def _bucket_of(self, shape: GraphShape, rows: int) -> GraphBucket | None:
        bucket = row_bucket(rows, self._row_buckets(shape))
        return None if bucket is None else GraphBucket(shape=shape, rows=bucket)

    def _predict_in(
        self, shape: GraphShape, rows: int, samples: Sequence[GraphSample], branches: bool
    ) -> list[Prediction] | None:
        costs = {b.rows: graph.cost for b, graph in self.graphs.items() if b.shape == shape}
        if row_bucket(rows, list(costs)) is None:
            return self._miss("not captured")
        bucket_rows = cheapest_rows(rows, costs, self._token_share(shape, samples))
        if bucket_rows is None:
            return self._miss("eager is cheaper")
        if self._weights_at != self._weights_now():
            self.drop("the weights moved")
            return self._miss("not captured")
        graph = self.graphs[GraphBucket(shape=shape, rows=bucket_rows)]
        inputs = self._inputs[shape]
        if not inputs.holds(samples, bucket_rows):
            for refusal in filter(None, map(inputs.refusal, samples)):
                logger.warning_once(
                    "Bucket graph %s not replayed: %s", graph.bucket.label, refusal
                )
                return self._miss("other inputs")
        try:
            inputs.load(samples, bucket_rows)
            graph.replay()
            predictions = take(graph, inputs, samples, branches=branches)
        except Exception as error:
            logger.error("A replay failed, the step runs eagerly: %s", error, exc_info=True)
            self._drop_graph(graph.bucket)
            self.refused[graph.bucket] = f"a replay failed: {error!r}"
            return self._miss("replay failed")
        self.budget.use(graph.bucket)
        self.padding = bucket_rows - rows
        self.replays[graph.bucket.label] += 1
        self.padding_rows[graph.bucket.label] += self.padding
        return predictions

    def _miss(self, reason: str) -> None:
        self.misses[reason] += 1

    def _weights_now(self) -> int:
        return next(self.adapter.dit.parameters()).data_ptr()

    # --- capture --------------------------------------------------------------------------------

    def capture(self, bucket: GraphBucket, *, spare: int | None = None) -> bool:
        """Whether the bucket has a graph afterwards; a failure leaves nothing behind.

        Args:
            spare: of graphs that must go to make room, only those that fewer steps than this
                asked for; None: any.
        """
        if self.graphs and self._weights_at != self._weights_now():
            self.drop("the weights moved")
        self._weights_at = self._weights_now()
        try:
            graph = self._capture(bucket, spare)
        except Exception as error:
            self.refused[bucket] = str(error)
            logger.warning("No graph for %s, it runs eagerly: %s", bucket.label, error)
        else:
            self.graphs[bucket] = graph
            self.budget.add(bucket, graph.own_bytes, self.budget.pool + graph.pool_bytes)
        self._tidy()
        return bucket in self.graphs

    def _capture(self, bucket: GraphBucket, spare: int | None) -> BucketGraph:
        self.mount(bucket.shape.quality)
        inputs = self._inputs.get(bucket.shape) or self._make_inputs(bucket.shape)
        self._inputs[bucket.shape] = inputs
        graph = capture(
            bucket,
            inputs,
            lambda rows: self.forward(inputs, rows),
            self.recorder,
            self.context,
            lambda seed: inputs.load(self._random_samples(bucket, seed), bucket.rows),
            self.meter,
            lambda activations: self._make_room(activations, spare),
        )
        if self.config.mode == "auto" and graph.cost.replay_ms >= graph.cost.eager_ms:
            self.recorder.reset(graph.recording)
            raise GraphRefused(
                f"it does not pay: {graph.cost.replay_ms:.2f} ms against "
                f"{graph.cost.eager_ms:.2f} ms eagerly"
            )
        return graph

    def _make_inputs(self, shape: GraphShape) -> StaticInputs:
        (sample,) = self._random_samples(GraphBucket(shape=shape, rows=1), seed=0)
        (kwargs,) = sample.branches.values()
        return StaticInputs(
            self.adapter, shape, max(self._row_buckets(shape)), kwargs, sample.latents
        )

    def _random_samples(self, bucket: GraphBucket, seed: int) -> list[GraphSample]:
        """Samples that fill the bucket: guided ones, and an unguided one where a row is left."""
        generator = torch.Generator(self.device).manual_seed(seed)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=self.device)

        shape = bucket.shape
        samples, rows = [], 0
        while rows < bucket.rows:
            names = ("uncond", "cond") if bucket.rows - rows > 1 else ("cond",)
            # masked texts of several lengths, the longest among them
            lengths = [
                max(1, shape.text_length - 7 * (rows + i)) if shape.masked else shape.text_length
                for i in range(len(names))
            ]
            samples.append(
                GraphSample(
                    serial=next(_random_serials),
                    latents=random(1, *shape.latent_shape).to(self.dtype),
                    timestep_B=random(1).abs() * 300 + 1,
                    scale=1.5 + rows if len(names) > 1 else 1.0,
                    branches={
                        name: self.example(shape, length, generator)
                        for name, length in zip(names, lengths)
                    },
                )
            )
            rows += len(names)
        return samples

    def example(
        self, shape: GraphShape, text_length: int, generator: torch.Generator
    ) -> BranchKwargs:
        """Random conditioning of one image, as requests of this server bring it."""
        return self.adapter.example(
            shape.latent_shape, text_length, self.dtype, self.text_dtypes, generator
        )

    def _make_room(self, activations: int, spare: int | None) -> None:
        own = max((graph.own_bytes for graph in self.graphs.values()), default=0)
        drops = self.budget.make_room(own, activations)
        if drops is None:
            raise GraphRefused(
                f"it needs {_mb(own + activations)} MB of --bucket-graph-memory-gb, "
                f"{_mb(self.budget.limit)} MB"
            )
        if spare is not None and any(self.demand.steps[bucket] >= spare for bucket in drops):
            raise GraphRefused("the budget is full of graphs that as many steps ask for")
        for bucket in drops:
            logger.info("Bucket graph %s dropped for another: least recently used", bucket.label)
            self._drop_graph(bucket)

    def capture_next(self) -> bool:
        """Capture what most of the traffic misses; call it when nothing runs or waits.

        Returns:
            Whether something was tried, so that there may be more to do.
        """
        bucket = self.demand.next_capture(self.graphs.keys(), self.refused.keys())
        if bucket is None:
            return False
        if self.capture(bucket, spare=self.demand.steps[bucket]):
            graph = self.graphs[bucket]
            logger.info(
                "Bucket graph %s captured in %.2f s: %.2f ms against %.2f ms eagerly; "
                "%.0f%% of all steps replayed so far",
                bucket.label,
                graph.capture_s,
                graph.cost.replay_ms,
                graph.cost.eager_ms,
                100 * self.demand.replayed_share,
            )
        return True

    # --- dropping -------------------------------------------------------------------------------

    def drop(self, reason: str) -> None:
        """Give back all graphs: something that they replay has changed."""
        if self.graphs:
            logger.info("%d bucket graphs dropped: %s", len(self.graphs), reason)
        for bucket in list(self.graphs):
            self._drop_graph(bucket)
        self.refused.clear()
        self._tidy()

    def _drop_graph(self, bucket: GraphBucket) -> None:
        graph = self.graphs.pop(bucket)
        self.recorder.reset(graph.recording)
        self.budget.remove(bucket)

    def _tidy(self) -> None:
        """Let go of inputs without a graph and of what captures left in the allocator."""
        shapes = {bucket.shape for bucket in self.graphs}
        self._inputs = {shape: held for shape, held in self._inputs.items() if shape in shapes}
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def take(
    graph: BucketGraph,
    inputs: StaticInputs,
    samples: Sequence[GraphSample],
    *,
    branches: bool = False,
) -> list[Prediction]:
    """Each sample's part of the outputs, out of the way of the next replay."""
    sizes = [sample.rows.images for sample in samples]
    wanted = [graph.combined.clone()]
    if branches:
        wanted += inputs.branch_rows(graph.rows_out)
    parts = (whole[: sum(sizes)].split(sizes) for whole in wanted)
    return [Prediction(*of_one) for of_one in zip(*parts)]


def _mb(count: int) -> int:
    return round(count / 2**20)
