"""Degrees of parallelism: a plan in the words in which people state one, and the arithmetic they have to obey.

devices = dp x cp x tp x pp
expert group = ep x etp neighbours of a stage, as in Megatron-LM and torchtitan: the tensor-parallel devices (parts of
               each expert, or with etp 1 whole ones), then all context-parallel ones, then some of the data-parallel:
               ep / cp divides dp, with etp 1 ep / (cp x tp) does
devices with the same experts = devices / (pp x ep x etp)
global batch = dp x microbatch x (number of microbatches), or the sum over shares of devices x microbatch x microbatches
"""

from dataclasses import dataclass, replace
from math import gcd
from typing import Literal

from autopar.cluster import Cluster
from autopar.context_parallelism import CONTEXT_KINDS, ContextKind
from autopar.errors import JobError
from autopar.limits import MAX_BATCH, MAX_DEVICES, MAX_MICROBATCHES
from autopar.recompute import Recompute, parse_share
from autopar.schedule import SCHEDULES, usual_schedule
from autopar.shares import Share

_DUAL_PIPE = "--schedule dualpipe-v --interleave 2 with half the pp and twice the dp has the stages, bubble and memory"
"""What to ask for in place of DualPipe, whose two directions are two data-parallel copies of DualPipeV."""


SHARD = "shard"
"""Mesh axis of the data-parallel devices that share what ZeRO splits, where these are not all."""


@dataclass(frozen=True, slots=True)
class Degrees:
    """A plan stated by degrees.

    Attributes:
        dp: Data-parallel degree, expert groups included.
        tp: Tensor-parallel degree.
        pp: Groups of devices in the pipeline.
        cp: Context-parallel degree: positions of a sequence are split.
        ep: Expert-parallel degree: devices that have different experts. They are the context-parallel ones, with `etp`
            1 the tensor-parallel ones, and as many of the data-parallel ones as there are beyond: a multiple of `cp`
            (and `tp`) that divides `dp x cp` (`x tp`).
        etp: Devices that each expert is split over: 0 for the tensor-parallel ones, or 1.
        zero: What data-parallel devices share instead of copying it: 0 nothing, 1 the update and its state, 2 the sums
            of gradients too, 3 the parameters too.
        shard: Data-parallel devices, of those that have the same experts, that share what ZeRO splits; groups of so
            many hold copies. 0 for all of them, or for fewer where that leaves a device less: a dim of fewer elements
            stays whole, others are padded. All where there are context, expert and tensor parallelism, too.
        sequence_parallel: Whether what tensor-parallel devices would copy is split along the sequence.
        recompute: What layers run again in the backward pass: "none", "selective" or "full"; or "offload", if they run
            nothing again but keep in host memory what they save.
        recompute_every: Of how many layers of a stage the last one recomputes; 1 for all of them.
        offload: What lies in host memory between steps: "" for nothing, a key of `autopar.recompute.STATE_KINDS`, or a
            share of that as "optimizer=0.5": of the first blocks of each stage, as many as come nearest to it.
        schedule: Order of microbatches, a key of `autopar.schedule.SCHEDULES`; "" for the usual one of the mode: in
            training 1F1B, interleaved with several stages per group, in inference forward-only.
        interleave: Stages per group of devices.
        microbatch: Samples of one microbatch per data-parallel device.
        global_batch: Samples per step.
        layers: Layers per stage in the order of the chain; empty for an even cut.
        predictions: Modules of multi-token prediction per stage, where `layers` are given; empty if the last stage has
            all of them.
        pp_inside: Whether data parallelism lies around pipelines, `--use-tp-pp-dp-mapping` of Megatron-LM: devices are
            numbered along tp, ep and cp first, then along pp, then along the rest of dp. Otherwise pp comes last.
        shares: Consecutive data-parallel devices and the microbatches of each, where they have different numbers of
            them; empty if all have equally many.
        cp_kind: How attention gets at positions of other devices, one of `CONTEXT_KINDS`; "" for what the software
            stack runs by default.

    Raises:
        JobError: If a number is not positive, is more than can be planned, or does not divide what it has to.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 0
    zero: int = 0
    shard: int = 0
    sequence_parallel: bool = False
    recompute: str = "none"
    recompute_every: int = 1
    offload: str = ""
    schedule: str = ""
    interleave: int = 1
    microbatch: int = 1
    global_batch: int = 1
    layers: tuple[int, ...] = ()
    predictions: tuple[int, ...] = ()
    pp_inside: bool = False
    cp_kind: ContextKind | Literal[""] = ""
    shares: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "cp", "ep", "interleave", "microbatch", "global_batch", "recompute_every"):
            if getattr(self, name) < 1:
                raise JobError(f"{name} is {getattr(self, name)}", hint="degrees and batches are whole numbers from 1")
        if self.zero not in range(4):
            raise JobError(f"ZeRO stage {self.zero}", hint="--zero takes 0, 1, 2 or 3")
        if self.recompute not in set(Recompute):
            raise JobError(f"recompute {self.recompute!r}", hint=f"choose {', '.join(Recompute)}")
        parse_share(self.offload)
        if self.schedule and self.schedule not in SCHEDULES:
            hint = _DUAL_PIPE if self.schedule == "dualpipe" else f"choose {', '.join(SCHEDULES)}"
            raise JobError(f"there is no schedule {self.schedule!r}", hint=hint)
        if self.cp_kind not in ("", *CONTEXT_KINDS):
            raise JobError(f"context parallelism {self.cp_kind!r}", hint=f"choose {', '.join(CONTEXT_KINDS)}")
        if self.cp_kind and self.cp == 1:
            raise JobError(f"{self.cp_kind} of keys and values without context parallelism", hint="give --cp 2 or more")
        self._check_batch()
        self._check_data()
        self._check_amounts()
        if self.sequence_parallel and self.tp == 1:
            raise JobError("sequence parallelism without tensor parallelism", hint="give --tp 2 or more")
        if min(self.layers, default=0) < 0:
            raise JobError(f"layers per stage are {self.layers}", hint="stages have 0 layers or more")
        if self.layers and len(self.layers) != self.num_stages:
            raise JobError(
                f"layers are given for {len(self.layers)} stages, there are {self.num_stages}",
                hint="there are pp x interleave stages",
            )

        if self.predictions and len(self.predictions) != len(self.layers):
            raise JobError(
                f"modules of multi-token prediction are given for {len(self.predictions)} stages, layers for "
                f"{len(self.layers)}",
                hint="give both for every stage, e.g. by --layout 'Et*2|t*2|mL'",
            )

    def _check_amounts(self) -> None:
        for what, number, most in (
            ("devices", self.gpus, MAX_DEVICES),
            ("stages", self.num_stages, MAX_DEVICES),
            ("microbatches", self.num_microbatches, MAX_MICROBATCHES),
            ("samples", self.global_batch, MAX_BATCH),
        ):
            if number > most:
                raise JobError(f"{number} {what} are more than can be planned", hint=f"at most {most} can")

    def _check_data(self) -> None:
        if self.etp not in (0, 1, self.tp):
            raise JobError(
                f"experts are split over {self.etp} of {self.tp} tensor-parallel devices",
                hint=f"--etp {self.tp} splits them over all, --etp 1 gives each device whole experts",
            )
        self._check_experts()
        if self.shard and not self.zero:
            raise JobError(f"{self.shard} devices share what ZeRO splits, without ZeRO", hint="give --zero 1, 2 or 3")
        if self.shard < 0 or (self.shard and self.data % self.shard):
            raise JobError(
                f"groups of {self.shard} that share what ZeRO splits do not divide {self.data} data-parallel devices",
                hint=f"choose a divisor of {self.data}",
            )
        if 1 < self.shard < self.data and not self.may_share_apart:
            raise JobError(
                f"groups of {self.shard} that share what ZeRO splits, beside cp, ep and tp: a mesh of five axes",
                hint="let all data-parallel devices share, or leave one of these degrees at 1",
            )

    def _check_experts(self) -> None:
        inside = self._inside_experts
        if self.ep == 1 and not self.whole_experts:
            return
        if self.ep % inside == 0 and self.dp % (self.ep // inside) == 0:
            return
        fitting = gcd(self.dp, max(1, self.ep // inside)) * inside
        if inside == 1:
            raise JobError(
                f"the expert-parallel degree {self.ep} does not divide the data-parallel degree {self.dp}",
                hint=f"expert groups are made of data-parallel devices: --ep {fitting}",
            )
        names = [name for name, counts in (("cp", self.cp > 1), ("tp", self.whole_experts)) if counts]
        degrees = " x ".join(f"{name} {getattr(self, name)}" for name in names)
        raise JobError(
            f"{'with whole experts ' if self.whole_experts else ''}the expert-parallel degree {self.ep} has to be a "
            f"multiple of {degrees} that divides dp x {' x '.join(names)} = {self.dp * inside}",
            hint=f"--ep {fitting}" + (", or leave --etp out" if self.whole_experts else ""),
        )

    def _check_shares(self) -> None:
        devices = sum(count for count, _ in self.shares)
        if min(min(share) for share in self.shares) < 1 or devices != self.dp:
            raise JobError(
                f"shares are of {devices} data-parallel devices, there are {self.dp}",
                hint="name all of them with the microbatches of each, e.g. 8x5,8x3",
            )
        samples = self.microbatch * sum(count * each for count, each in self.shares)
        if samples != self.global_batch:
            raise JobError(
                f"shares of {self.microbatch} samples a microbatch are {samples} samples, the global batch is "
                f"{self.global_batch}",
                hint=f"a global batch of {samples}, or other shares",
            )
        if self.data != self.dp:
            raise JobError("shares beside expert parallelism: experts meet in every pass", hint="leave ep at 1")
        if self.zero > 1 and not self.shard:
            raise JobError(
                f"ZeRO {self.zero} over devices with different shares, which meet once per step",
                hint="--shard N shares within groups of N devices that have equal shares, or --zero 1",
            )

    def _check_batch(self) -> None:
        if self.shares:
            self._check_shares()
            return
        share = self.dp * self.microbatch
        if self.global_batch % share:
            raise JobError(
                f"a global batch of {self.global_batch} does not divide by dp {self.dp} x microbatch {self.microbatch}",
                hint=f"a global batch of {max(1, self.global_batch // share) * share} does",
            )

    @property
    def data(self) -> int:
        """Data-parallel devices that have the same experts."""
        return self.dp // self.expert_axis

    @property
    def whole_experts(self) -> bool:
        """Whether tensor-parallel devices have different experts, each a whole one, and not parts of the same."""
        return self.etp == 1 and self.tp > 1

    @property
    def context_experts(self) -> bool:
        """Whether context-parallel devices have different experts: wherever there are expert groups."""
        return self.ep > 1 and self.cp > 1

    @property
    def _inside_experts(self) -> int:
        """Context- and tensor-parallel devices of an expert group that have different experts."""
        return self.cp * (self.tp if self.whole_experts else 1)

    @property
    def expert_axis(self) -> int:
        """Data-parallel devices that have different experts."""
        return max(1, self.ep // self._inside_experts)

    @property
    def may_share_apart(self) -> bool:
        """Whether there is an axis left for those that share: of five, reshards are too many to be looked through."""
        return 1 in (self.cp, self.expert_axis, self.tp)

    @property
    def sharing(self) -> int:
        """How many of these share what ZeRO splits."""
        return self.shard or self.data

    def in_mode(self, mode: str) -> "Degrees":
        """Return the degrees with the usual schedule of a mode, "train" or "infer", if they name none.

        >>> Degrees().in_mode("train").schedule, Degrees().in_mode("infer").schedule
        ('1f1b', 'forward-only')
        """
        return self if self.schedule else replace(self, schedule=usual_schedule(mode))

    @property
    def gpus(self) -> int:
        """Number of devices."""
        return self.dp * self.cp * self.tp * self.pp

    def numbered(self, cluster: Cluster) -> Cluster:
        """Return a cluster whose devices are numbered as the plan lays out its pipelines.

        Raises:
            ClusterError: If pipelines inside data parallelism do not lie evenly in its nodes.
        """
        machine = cluster.by_node
        if not self.pp_inside or self.pp == 1 or self.data == 1 or self.gpus <= machine.devices_per_node:
            return machine
        return machine.by_group(self.pp, self.gpus // self.pp, self.gpus // self.pp // self.data)

    @property
    def num_stages(self) -> int:
        """Stages of the chain."""
        return self.pp * self.interleave

    @property
    def num_microbatches(self) -> int:
        """Microbatches per step; of the devices that have most if there are shares."""
        if self.shares:
            return max(each for _, each in self.shares)
        return self.global_batch // (self.dp * self.microbatch)

    @property
    def row_shares(self) -> tuple[Share, ...]:
        """Shares of the rows of the mesh: groups of data-parallel devices that share what ZeRO splits are a row.

        Raises:
            JobError: If such a group has devices with different shares.
        """
        found, first = list[Share](), 0
        size = self.sharing if self.sharing < self.data else 1
        for count, each in self.shares:
            if count % size:
                raise JobError(
                    f"a share of {count} devices has no whole groups of {size} that share what ZeRO splits",
                    hint="choose another --shard, or other shares",
                )
            found.append(Share((first, first + count // size), each))
            first += count // size
        return tuple(found)

    @property
    def samples(self) -> int:
        """Samples of one microbatch over all devices of a stage."""
        return self.dp * self.microbatch

    def __str__(self) -> str:
        named = {"dp": self.dp, "cp": self.cp, "ep": self.ep, "tp": self.tp, "pp": self.pp}
        return " ".join(f"{name}={degree}" for name, degree in named.items() if degree > 1 or name == "dp")
