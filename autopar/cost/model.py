"""The cost model that solver and simulator share: seconds of ops, collectives and sends on one cluster.

Ops are of four classes: matrix products (`autopar.cost.gemm`), batches of small products, attention (one fused kernel
or several, `autopar.cost.attention`), and everything else, which is bound by memory:

    seconds = 0.3 launch + memory_traffic x bytes / (memory bandwidth x bandwidth_efficiency x share of the kind)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import overload

import numpy as np

from autopar.cluster import Cluster
from autopar.cost import collectives
from autopar.cost.arrays import FloatArray, IntArray, Product, num_elements
from autopar.cost.attention import (
    ATTENTION_KINDS,
    UNFUSED_KERNELS,
    AttentionWork,
    attention_work,
    fused_flops,
    kept_bytes,
    merged_bytes,
    unfused_products,
    unfused_traffic,
)
from autopar.cost.collectives import Collective
from autopar.cost.dropout import dropout_bytes
from autopar.cost.formats import Format
from autopar.cost.fusion import ALONE, Fused, Kernel, fuse
from autopar.cost.gemm import ALIGNMENT, UNALIGNED_SHARE, compute_seconds, grouped, least_seconds, overlapped
from autopar.cost.handover import Handed, hand_over_seconds
from autopar.cost.learned_kernels import LearnedKernels
from autopar.cost.policy import MIXED, DtypePolicy
from autopar.cost.prices import Prices
from autopar.cost.products import GROUPED_KINDS, GROUPED_WEIGHT, PRODUCT_KINDS, op_products
from autopar.cost.scans import SCAN_KERNELS, scan_kept_bytes, scan_vector_seconds
from autopar.cost.stack import IDEAL, Stack
from autopar.cost.traffic import (
    CAST_SHARE,
    FLOAT32,
    HEAD_GRAD,
    LOGIT_BYTES,
    PERMUTE_SHARE,
    PLAIN_SHARE,
    bandwidth_share,
    is_of_experts,
    is_view,
    loss_bytes,
    op_bytes,
)
from autopar.events import Profile
from autopar.ir.fills import fill_of
from autopar.ir.graph import Cast, Linear, LinearProduct, Op, Phase
from autopar.ir.rings import RINGS
from autopar.ir.routing import Routed
from autopar.sharding import Axis

MEMORY_LAUNCH = 0.3  # launch of a kernel bound by memory, as a share of a matrix product's; fit
SMALL = 256.0  # products of a batch with a dim up to this are small: no channels of a head are more
# Kernels of the backward pass are launched from C++, those of the forward pass from Python: a layer of Megatron-LM
# takes the host 1.0 ms forward and 1.4 ms backward with about 1.8 times as many kernels (vTrain's single-node rows).
BACKWARD_HOST = 0.75


@dataclass(frozen=True, slots=True)
class CostModel:
    """What things cost.

    Attributes:
        cluster: The hardware.
        policy: Bytes per element and the class of numbers matrix products run in.
        stack: What the software makes of the hardware.
        prices: Measured seconds, which count in place of the formulas; None if there are none.
        kernels: Learned seconds of fused groups, which count in simulated steps; None for the formulas.
        slowdowns: Factors of the stack on seconds of transfers within nodes and beyond.
    """

    cluster: Cluster
    policy: DtypePolicy = MIXED
    stack: Stack = IDEAL
    prices: Prices | None = None
    kernels: LearnedKernels | None = None
    slowdowns: tuple[float, float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "policy", self.policy.on(self.cluster.device))
        object.__setattr__(self, "slowdowns", (self.stack["intra_slowdown"], self.stack["inter_slowdown"]))
        for numbers in self.policy.classes:
            self.cluster.device.peak(numbers)

    @property
    def profile(self) -> Profile | None:
        """The measured events that prices are made of; None if there are none."""
        return None if self.prices is None else self.prices.profile

    @property
    def learned(self) -> LearnedKernels | None:
        """The learned seconds of fused groups, if they were measured on the device of the cluster in its precision."""
        kernels = self.kernels
        return kernels if kernels is not None and kernels.holds_for(self.cluster.device, self.policy) else None

    def fuse(
        self, ops: Sequence[Op], ranks: Mapping[str, int], stated: Sequence[Kernel] | None = None
    ) -> Mapping[str, Fused]:
        """Return by name those of the ops of a block that the stack does not run as kernels of their own.

        Args:
            ops: Ops of one block in order, of one phase or of all.
            ranks: Number of dims by value name.
            stated: Kernels that a plan states in place of those of the stack; None if it states none.
        """
        return fuse(ops, ranks, self.stack.fusion, stated, self.stack.experts)

    def op_seconds(
        self,
        op: Op,
        inputs: Sequence[IntArray | None],
        outputs: Sequence[IntArray | None],
        element_bytes: Mapping[str, float],
        fused: Fused = ALONE,
    ) -> FloatArray:
        """Return the seconds of an op on one device for each of n strategies.

        Args:
            op: The operation; a function kind counts as one kernel.
            inputs: Local shape array (n, rank) of each input; None where absent.
            outputs: Local shape array (n, rank) of each output; None where absent.
            element_bytes: Bytes per element by value name, from `DtypePolicy.graph_element_bytes`.
            fused: What is left to the op's own kernel, from `fuse`.

        Returns:
            (n,) seconds; 0 for views and for what other kernels do, unless they were measured.
        """
        seconds = self._formula_seconds(op, inputs, outputs, element_bytes, fused)
        return seconds if self.prices is None else self.prices.op_seconds(op, inputs, outputs, element_bytes, seconds)

    def _formula_seconds(
        self,
        op: Op,
        inputs: Sequence[IntArray | None],
        outputs: Sequence[IntArray | None],
        element_bytes: Mapping[str, float],
        fused: Fused,
    ) -> FloatArray:
        """Return what the formulas say; arguments and result as of `op_seconds`."""
        first = next((shape for shape in inputs if shape is not None), None)
        nbytes = op_bytes(op, inputs, outputs, element_bytes, fused.unread, fused.unwritten)
        if is_view(op, 0 if first is None else first.shape[1]):
            return nbytes
        if op.kind in ATTENTION_KINDS:
            work = attention_work(op, inputs, outputs)
            seconds = self._attention_seconds(work, nbytes * work.blocks, element_bytes[op.inputs[0]])
            return seconds + self._merge_seconds(op, work, outputs, element_bytes) if op.kind in RINGS else seconds
        device = self.cluster.device
        if op.kind in PRODUCT_KINDS:
            if op.linear is not None and self.policy.format is not None:
                return self._quantized_seconds(op, op.linear, self.policy.format, inputs, outputs, element_bytes, fused)
            launches = SCAN_KERNELS.get(op.kind, 1) * self._experts_launched(op, first)
            return device.launch * launches + self._product_seconds(
                op, inputs, outputs, self.policy.numbers, nbytes, element_bytes
            )
        traffic = self.stack["memory_traffic"]
        traffic = max(1.0, traffic) if fused.experts or is_of_experts(op.kind) else traffic
        if fused.moved:
            shapes = ((*op.inputs, *op.outputs), (*inputs, *outputs))
            sizes = [
                num_elements(own) * element_bytes[name] for name, own in zip(*shapes, strict=True) if own is not None
            ]
            nbytes = nbytes + fused.moved * np.maximum.reduce(sizes)
        return self.launch_seconds(op, fused) + nbytes * (traffic / (self._bandwidth * bandwidth_share(op.kind)))

    def _quantized_seconds(
        self,
        op: Op,
        linear: Linear,
        quantized: Format,
        inputs: Sequence[IntArray | None],
        outputs: Sequence[IntArray | None],
        element_bytes: Mapping[str, float],
        fused: Fused,
    ) -> FloatArray:
        """Return the seconds of a product of a linear layer, and of the kernel that quantizes its operand.

        Arguments are as of `op_seconds`.
        """
        weight = linear.product is not LinearProduct.WEIGHT_GRADIENT
        read = op.inputs[:2] if quantized.activations else op.inputs[1:2] if weight else ()
        sizes = {**element_bytes, **{name: min(element_bytes[name], quantized.bytes) for name in read}}
        nbytes = op_bytes(op, inputs, outputs, sizes, fused.unread, fused.unwritten)
        launches = self._experts_launched(op, inputs[0])
        seconds = self.cluster.device.launch * launches + self._product_seconds(
            op, inputs, outputs, quantized.numbers, nbytes, sizes
        )
        operand = inputs[0 if weight else 1]
        if not self._casts(op, linear) or operand is None:
            return seconds
        copies = (self.policy.copies if linear.kept else 1) * quantized.bytes
        moved = num_elements(operand) * (quantized.reads * self.policy.activation + copies) * fill_of(op)
        traffic, share = self.stack["memory_traffic"], PLAIN_SHARE
        if op.kind in GROUPED_KINDS:
            traffic, share = max(1.0, traffic), CAST_SHARE
        return (
            seconds
            + launches * (quantized.reads * MEMORY_LAUNCH * self.cluster.device.launch)
            + moved * (traffic / (self._bandwidth * share))
        )

    def _casts(self, op: Op, linear: Linear) -> bool:
        """Whether a product of a linear layer has its operand quantized by a kernel of its own.

        Fused kernels of experts write what the next product of an expert reads in its format; activations before a
        product per expert write 16 bits whatever the format.
        """
        quantized = self.policy.format
        if quantized is None or not quantized.activations or linear.cast is Cast.BEFORE:
            return False
        by_maker = quantized.by_maker
        if op.kind in GROUPED_KINDS and self.stack.experts != "grouped":
            by_maker = self.stack.experts == "fused"
        return linear.cast is Cast.OWN or not by_maker

    def _experts_launched(self, op: Op, rows: IntArray | None) -> FloatArray | float:
        """Return the kernels of a product that are launched one after another: one, or one per expert of the device.

        Without fused or grouped kernels every expert of a device has a kernel of its own. The host learns how many
        tokens each has only when the router is done, so that these launches hide behind no earlier kernel, unless a
        CUDA graph holds them. Those behind the first count as many times as the host is slower than the device.

        Args:
            op: The product.
            rows: Local shape array of its first input, (n, rank); dim 0 of rows of experts are the experts.
        """
        if self.stack.experts != "each" or self.stack.graphs == "full" or op.kind not in GROUPED_KINDS or rows is None:
            return 1.0
        device = self.cluster.device
        slower = max(1.0, device.host_launch / device.launch)
        return 1.0 + (rows[:, 0].astype(np.float64) - 1.0) * slower

    def _numbers(self, op: Op) -> str:
        """Return the class of numbers that the products of an op run in."""
        quantized = self.policy.format
        return self.policy.numbers if op.linear is None or quantized is None else quantized.numbers

    def launch_seconds(self, op: Op, fused: Fused = ALONE) -> float:
        """Return the seconds an op that is no view takes however small it is."""
        if not fused.launches:
            return 0.0
        is_product = op.kind in PRODUCT_KINDS or op.kind in ATTENTION_KINDS
        kernels = SCAN_KERNELS.get(op.kind, 1.0) if is_product else MEMORY_LAUNCH
        return self.cluster.device.launch * kernels * self._least_ratio(op)

    def _least_ratio(self, op: Op) -> float:
        """Return what an op takes at least as a share of its formula; 1 without measured prices."""
        return 1.0 if self.prices is None else self.prices.least_ratio(op)

    def least_compute_seconds(
        self, op: Op, inputs: Sequence[IntArray | None], outputs: Sequence[IntArray | None]
    ) -> FloatArray:
        """Return seconds of computing, (n,), that no sharding of an op needs less of, over all its devices."""
        return self._least_ratio(op) * self._least_by_formula(op, inputs, outputs)

    def _least_by_formula(
        self, op: Op, inputs: Sequence[IntArray | None], outputs: Sequence[IntArray | None]
    ) -> FloatArray:
        device = self.cluster.device
        numbers = self._numbers(op)
        peak = device.peak(numbers)
        batched = device.batched_efficiency * self.stack["attention_efficiency"]
        if op.kind in ATTENTION_KINDS:
            fused = device.attention_efficiency * self.stack["attention_efficiency"]
            best = fused if self.stack.attention == "fused" else batched
            return attention_work(op, inputs, outputs).flops / (peak * best)
        best = max(device.efficiency(numbers) * self.stack["gemm_efficiency"], batched)
        total: FloatArray = np.zeros(1) + scan_vector_seconds(op, inputs, device)
        for product in op_products(op, inputs, outputs):
            if not product.on_vectors:
                total = total + least_seconds(product, device, peak * best)
        return total

    def bytes_per_second(self, op: Op) -> float:
        """Return the bytes/s that an op moves at most."""
        rate = self._bandwidth / self._least_ratio(op)
        if op.kind in ATTENTION_KINDS or op.kind in PRODUCT_KINDS:
            return rate
        return rate * bandwidth_share(op.kind) / self.stack["memory_traffic"]

    @property
    def _bandwidth(self) -> float:
        return self.cluster.device.memory_bandwidth * self.cluster.device.bandwidth_efficiency

    def _product_seconds(
        self,
        op: Op,
        inputs: Sequence[IntArray | None],
        outputs: Sequence[IntArray | None],
        numbers: str,
        nbytes: FloatArray,
        element_bytes: Mapping[str, float],
    ) -> FloatArray:
        """Return the seconds of an op of products that moves `nbytes`, without its launch.

        The weight gradient of experts is added to the sum over microbatches where chains are fused: it reads the sum.
        """
        products = op_products(op, inputs, outputs)
        compute = self._products_seconds(products, numbers, batches=op.kind not in GROUPED_KINDS)
        if op.kind not in GROUPED_KINDS:
            compute = compute + scan_vector_seconds(op, inputs, self.cluster.device)
            return overlapped(compute, nbytes / self._bandwidth)
        written, sums = outputs[0], op.kind == GROUPED_WEIGHT and self.stack.fusion == "chains"
        if sums and written is not None:
            nbytes = nbytes + num_elements(written) * element_bytes[op.outputs[0]]
        return grouped(products[0], compute, nbytes / self._bandwidth, self.cluster.device, sums=sums)

    def _products_seconds(self, products: Sequence[Product], numbers: str, *, batches: bool = True) -> FloatArray:
        """Return the seconds on the matrix units; batches of small products reach less than one large product.

        Args:
            products: The products.
            numbers: Class of numbers they run in.
            batches: Whether those of a batch are one kernel for small products.
        """
        device = self.cluster.device
        rate = device.peak(numbers) * device.efficiency(numbers) * self.stack["gemm_efficiency"]
        total: FloatArray = np.zeros(1)
        for product in products:
            if product.on_vectors:
                continue
            seconds = compute_seconds(product, device, rate)
            small = batches & (product.batch > 1) & (np.minimum(np.minimum(product.m, product.n), product.k) <= SMALL)
            if small.any():
                seconds = np.where(small, self._batched_seconds(product, numbers), seconds)
            total = total + seconds
        return total

    def _batched_seconds(self, product: Product, numbers: str) -> FloatArray:
        device = self.cluster.device
        rate = device.peak(numbers) * device.batched_efficiency * self.stack["attention_efficiency"]
        unaligned = (product.n % ALIGNMENT > 0) | (product.k % ALIGNMENT > 0)
        return compute_seconds(product, device, rate) * np.where(unaligned, 1 / UNALIGNED_SHARE, 1.0)

    def _attention_seconds(self, work: AttentionWork, nbytes: FloatArray, element: float) -> FloatArray:
        """Return the seconds of attention that reads and writes `nbytes` besides its scores."""
        device = self.cluster.device
        if self.stack.attention == "fused":
            rate = device.peak(self.policy.numbers) * device.attention_efficiency * self.stack["attention_efficiency"]
            return device.launch * work.blocks + overlapped(fused_flops(work) / rate, nbytes / self._bandwidth)
        seconds: FloatArray = np.zeros_like(work.scores)
        for product in unfused_products(work):
            moved = element * product.batch * (product.m * product.k + product.k * product.n + product.m * product.n)
            seconds = (
                seconds
                + device.launch * work.blocks
                + overlapped(self._batched_seconds(product, self.policy.numbers), moved / self._bandwidth)
            )
        between = UNFUSED_KERNELS[work.is_gradient] - (4 if work.is_gradient else 2)
        traffic = self.stack["memory_traffic"] * unfused_traffic(work, element) / (self._bandwidth * PLAIN_SHARE)
        return seconds + traffic + between * MEMORY_LAUNCH * device.launch * work.blocks

    def _merge_seconds(
        self, op: Op, work: AttentionWork, outputs: Sequence[IntArray | None], element_bytes: Mapping[str, float]
    ) -> FloatArray:
        """Return the seconds in which a ring merges what each block gives into the result so far."""
        made = zip(op.outputs, outputs, strict=False)
        results = sum(num_elements(shape) * element_bytes[name] for name, shape in made if shape is not None)
        moved = merged_bytes(work, np.asarray(results, dtype=np.float64))
        rate = self._bandwidth * PLAIN_SHARE / self.stack["memory_traffic"]
        return (work.blocks - 1) * MEMORY_LAUNCH * self.cluster.device.launch + moved / rate

    def kept_bytes(
        self,
        op: Op,
        inputs: Sequence[IntArray | None],
        outputs: Sequence[IntArray | None],
        element_bytes: Mapping[str, float],
        *,
        splits: bool = False,
    ) -> FloatArray:
        """Return the bytes an op keeps for its gradient besides values of the graph, (n,).

        Unfused attention keeps its scores: probabilities, what dropout left of them, and its mask; a delta rule the
        inverses of its triangular matrices; a loss its probabilities (`loss_bytes`); dropout its masks
        (`dropout_bytes`). What a gradient "keeps" is there
        while it runs: of a head with its cross-entropy the float32 logits of a chunk, of so many tokens that they are
        as many numbers as the head reads (Liger Kernel, `fused_linear_cross_entropy.py`). Arguments are as of
        `op_seconds`, and whether devices share the classes of a loss.
        """
        if op.kind in SCAN_KERNELS:
            return scan_kept_bytes(op, inputs, element_bytes[op.inputs[0]])
        if op.kind == HEAD_GRAD:
            hidden = inputs[0]
            assert hidden is not None, op.name
            return num_elements(hidden) * FLOAT32
        if op.kind in LOGIT_BYTES:
            logits = inputs[0]
            assert logits is not None, op.name
            return num_elements(logits) * loss_bytes(
                op.kind, self.stack.loss, element_bytes[op.inputs[0]], splits=splits
            )
        masks = dropout_bytes(op, inputs, element_bytes, self.stack.dropout)
        if op.linear is not None:
            kept = self._kept_quantized(op, op.linear, inputs, element_bytes)
            return kept if masks is None else kept + masks
        if masks is not None:
            return masks
        if op.kind not in ATTENTION_KINDS:
            return np.zeros(next((len(shape) for shape in (*outputs, *inputs) if shape is not None), 0))
        work = attention_work(op, inputs, outputs)
        fused, dropout = self.stack.attention == "fused", self.stack.dropout != "none"
        return kept_bytes(work, element_bytes[op.inputs[0]], fused=fused, dropout=dropout)

    def _kept_quantized(
        self, op: Op, linear: Linear, inputs: Sequence[IntArray | None], element_bytes: Mapping[str, float]
    ) -> FloatArray:
        """Return the bytes of the quantized copy of a forward operand that is kept in 16 bits, too, (n,)."""
        operand, quantized = inputs[0], self.policy.format
        assert operand is not None, op.name
        is_first = linear.product is LinearProduct.FORWARD and linear.cast is not Cast.BEFORE and linear.kept
        if not is_first or quantized is None or not quantized.activations:
            return np.zeros(len(operand))
        if element_bytes[op.inputs[0]] < self.policy.activation * fill_of(op):
            return np.zeros(len(operand))
        return num_elements(operand) * quantized.bytes * fill_of(op)

    def op_kernels(self, op: Op, rank: int, fused: Fused = ALONE) -> int:
        """Return the kernels an op starts.

        Args:
            op: The operation.
            rank: Dims of its first input.
            fused: What is left to the op's own kernel, from `fuse`.
        """
        if not fused.launches or is_view(op, rank):
            return 0
        if op.kind in ATTENTION_KINDS and self.stack.attention == "unfused":
            return UNFUSED_KERNELS["Grad" in op.kind]
        kernels = SCAN_KERNELS.get(op.kind, 1)
        if op.linear is not None and self.policy.format is not None and self._casts(op, op.linear):
            kernels += self.policy.format.reads
        return kernels

    def host_seconds(self, op: Op, rank: int, fused: Fused = ALONE) -> float:
        """Return the seconds the host needs to start the kernels of an op.

        Host and device work beside each other: a pass of a block takes as long as the slower of the two sums over its
        ops. What CUDA graphs launch takes the host no time. Arguments are as of `op_kernels`.
        """
        if self.stack.graphs == "full" or (self.stack.graphs == "partial" and not is_of_experts(op.kind)):
            return 0.0
        share = BACKWARD_HOST if op.phase is Phase.BACKWARD else 1.0
        return self.op_kernels(op, rank, fused) * share * self.stack["host_launch"]

    @overload
    def collective_seconds(
        self, collective: Collective | str, nbytes: float, axis: Axis, routed: Routed | None = None
    ) -> float: ...

    @overload
    def collective_seconds(
        self, collective: Collective | str, nbytes: FloatArray, axis: Axis, routed: Routed | None = None
    ) -> FloatArray: ...

    def collective_seconds(
        self, collective: Collective | str, nbytes: float | FloatArray, axis: Axis, routed: Routed | None = None
    ) -> float | FloatArray:
        """Return the seconds of a collective over a mesh axis (`autopar.cost.collectives` has the formulas).

        Args:
            collective: "all_reduce", "all_gather", "reduce_scatter" or "all_to_all".
            nbytes: Bytes of the larger side on one device: the output of all_gather, the input of the others.
            axis: The mesh axis.
            routed: Of rows of experts, which of these the tokens chose.

        Raises:
            ValueError: If there is no such collective.
        """
        kind, size = Collective(collective), np.asarray(nbytes, float)
        seconds = formula = collectives.collective_seconds(kind, size, axis, self.cluster, self.slowdowns)
        if self.prices is not None and axis.size > 1:
            inside = collectives.devices_in_node(axis, self.cluster.devices_per_node)
            seconds = self.prices.transfer_seconds(kind, size, axis.size, inside, formula)
        if routed is not None and routed.parts and axis.size > 1:  # as much slower as an all-to-all was measured to be
            seconds = self._dispatch_seconds(size, axis, routed) * (seconds / np.maximum(formula, 1e-30))
        return seconds if isinstance(nbytes, np.ndarray) else float(seconds)

    def _dispatch_seconds(self, nbytes: FloatArray, axis: Axis, routed: Routed) -> FloatArray:
        """Return the seconds in which rows of experts go to the devices that have the experts, or come back.

        A stack makes links and kernels slower than they are alone and not faster: a factor below 1 stands for what
        hides other collectives, and these are waited for. An all-to-all of all copies also sorts them by expert on the
        device that has several, which reads and writes them once; a dispatcher that sends a token once makes its copies
        there.
        """
        slower = max(1.0, self.slowdowns[0]), max(1.0, self.slowdowns[1])
        if self.stack.dispatch == "per-node":
            return collectives.collective_seconds(Collective.ALL_TO_ALL, nbytes, axis, self.cluster, slower, routed)
        seconds = collectives.collective_seconds(Collective.ALL_TO_ALL, nbytes, axis, self.cluster, slower)
        if axis.size == 1 or axis.size * routed.parts >= routed.routing.experts:
            return seconds
        moved = 2 * max(1.0, self.stack["memory_traffic"]) / (self._bandwidth * PERMUTE_SHARE)
        return seconds + MEMORY_LAUNCH * self.cluster.device.launch + nbytes * moved

    def send_seconds(self, nbytes: float, tier: int) -> float:
        """Return the seconds of sending `nbytes` from one device to another.

        Args:
            nbytes: What is sent.
            tier: Where they meet (`Cluster.tier`): 0 (or False) within a node, 1 (or True) between nodes, 2 and more
                between wider domains.
        """
        seconds = collectives.send_seconds(nbytes, tier, self.cluster, self.slowdowns)
        if self.prices is None or nbytes <= 0:
            return seconds
        inside = 1 if tier else 2
        return float(self.prices.transfer_seconds("send", np.asarray(nbytes), 2, inside, np.asarray(seconds)))

    @overload
    def exchange_seconds(self, nbytes: float, axis: Axis) -> float: ...

    @overload
    def exchange_seconds(self, nbytes: FloatArray, axis: Axis) -> FloatArray: ...

    def exchange_seconds(self, nbytes: float | FloatArray, axis: Axis) -> float | FloatArray:
        """Return the seconds of a halo exchange over a mesh axis in which each device sends `nbytes`."""
        size = np.asarray(nbytes, float)
        seconds = collectives.exchange_seconds(size, axis, self.cluster, self.slowdowns)
        if self.prices is not None and axis.size > 1:
            inside = min(2, collectives.devices_in_node(axis, self.cluster.devices_per_node))
            seconds = self.prices.transfer_seconds("send", size, 2, inside, seconds)
        return seconds if isinstance(nbytes, np.ndarray) else float(seconds)

    def on(self, devices: range) -> "CostModel":
        """Return the costs of work on some devices: of their group of nodes if the cluster has several."""
        cluster = self.cluster.on(devices)
        return self if cluster is self.cluster else replace(self, cluster=cluster)

    def on_rows(self, row: range) -> "CostModel":
        """Return the costs of rows of equal devices beside others, given the devices of one row."""
        cluster = self.cluster.on_rows(row)
        return self if cluster is self.cluster else replace(self, cluster=cluster)

    def overlapped(self) -> "CostModel":
        """Return the costs under a schedule that sends tokens beside the compute of another microbatch."""
        return self if self.stack.hides_dispatch else replace(self, stack=self.stack.overlapped())

    def between(self, devices: range) -> "CostModel":
        """Return the costs of what single devices send to each other: of their group of nodes if they lie in one."""
        return self.on(devices[:1]) if self.cluster.one_kind(devices) else self

    def hand_over_seconds(self, values: Sequence[Handed]) -> float:
        """Return the seconds of handing values from one stage to another, all at once.

        Stages may have meshes of any sizes, and hold the values at any placements; see `autopar.cost.handover`.

        Args:
            values: What is handed; all from one stage to one other.

        Raises:
            ShardingError: If a value cannot be placed so, or lies there as terms of another reduction than a sum.
        """
        ends = [end for value in values for side in (value.source, value.target) for end in side.ends]
        view = self.between(range(min(ends), max(ends) + 1)) if ends else self
        return hand_over_seconds(values, self.cluster, view.send_seconds)

    def overlap_slowdown(self, axis: Axis) -> float:
        """Return the factor on compute and on the collectives of an axis while both run, 1 or above."""
        link = self.cluster.tiers[collectives.widest_tier(axis, self.cluster)][1]
        return link.overlap_slowdown * self.stack["overlap_slowdown"]
