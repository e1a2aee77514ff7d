"""Plans by degrees and what becomes of them: placed, cut, lowered, verified and simulated, as any other plan.

Degrees are a schedule of tactics, and a plan by degrees is what `autopar partition` makes of it. A `Predictor` keeps
what plans of one model share: the graph of each microbatch size, the sharding rules, the placements of each mesh. No
price decides a placement, so that a prediction is a function of the numbers of a software stack that can be fitted.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from autopar.cluster import Cluster, load_cluster
from autopar.cost import IDEAL, MIXED, NEAREST, CostModel, DtypePolicy, Stack, load_policy, priced, resolve_stack
from autopar.degrees import SHARD, Degrees
from autopar.describe.axis_roles import roles_of_axes
from autopar.describe.context_kinds import context_kinds
from autopar.describe.one_line import summarise
from autopar.discover import Rules
from autopar.errors import JobError
from autopar.events import Profile
from autopar.folding.fold import Folded
from autopar.plan import DimSize, Plan, Remark
from autopar.program.lower import lower
from autopar.program.records import Program
from autopar.program.verify import verify_program
from autopar.recompute import Recompute
from autopar.simulate import Timeline, simulate
from autopar.tactics.by_degrees import (
    mesh_by_degrees,
    placing_by_degrees,
    sharing_devices,
    stages_by_degrees,
    whole_by_degrees,
)
from autopar.tactics.draft import Draft
from autopar.task import check_request, job_machine, make_job, rules_for
from autopar.training import Lora
from autopar.verdict import simulated
from autopar.workload import Workload, open_workload

_DIVIDED = {
    "dp": "the samples of a microbatch",
    SHARD: "the samples of a microbatch",
    "cp": "the positions of a sequence",
    "ep": "the experts of a layer",
    "tp": "the attention heads and the widths of the layers",
}
"""What an axis of a mesh by degrees splits."""

_ANY_BATCH = 2
"""Samples of a model whose parameters are looked at."""


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """What a plan by degrees comes to.

    Attributes:
        degrees: What was asked for, with how many devices share what ZeRO splits and the kind of context parallelism.
        plan: The plan, with the simulator's verdict.
        program: The plan lowered.
        timeline: One simulated step.
        whole: Share of the parameters that ZeRO leaves whole, if there is ZeRO.
    """

    degrees: Degrees
    plan: Plan
    program: Program
    timeline: Timeline
    whole: float = 0.0

    @property
    def fits(self) -> bool:
        """Whether every stage stays within the memory limit, and what is offloaded within the memory of the hosts."""
        return self.timeline.fits(*self.plan.stage_limits)


@dataclass(eq=False)
class Predictor:
    """Predictions for one model.

    Attributes:
        workload: The model.
        cache_dir: Where discovered rules are kept between runs; None to keep nothing.
        verify: Whether programs are checked against the graph and the rules.
        known: Sharding rules of the model's ops, if they have been discovered.
    """

    workload: Workload
    cache_dir: str | Path | None = None
    verify: bool = True
    known: Rules | None = None
    _placed: dict[object, Draft] = field(default_factory=dict, repr=False)
    _rules: dict[int, Rules] = field(default_factory=dict, repr=False)
    _sharing: dict[tuple[int, int], int] = field(default_factory=dict, repr=False)

    @cached_property
    def rules(self) -> Rules:
        """Sharding rules of the model's ops."""
        return self.known or self.workload.rules(cache_dir=self.cache_dir)

    def predict(
        self,
        degrees: Degrees,
        cluster: Cluster,
        stack: Stack = IDEAL,
        *,
        policy: DtypePolicy = MIXED,
        memory_limit: float | None = None,
        first_layers: int = 0,
        trace: bool = False,
        profile: Profile | None = None,
    ) -> Prediction:
        """Return what a plan by degrees comes to.

        Args:
            degrees: The plan.
            cluster: The hardware.
            stack: The software.
            policy: Bytes per element.
            memory_limit: Bytes per device a plan should use; None for most of the device's memory.
            first_layers: Layers of every stage, the first ones, that recompute; 0 for all.
            trace: Whether to collect the bars of a trace.
            profile: Measured events that count in place of formulas.

        Raises:
            JobError: If the degrees do not fit the cluster.
            TacticError: If they do not fit the model.
        """
        cluster = degrees.numbered(job_machine(degrees.gpus, cluster.by_node))
        check_request(degrees.gpus, cluster.by_node, degrees.global_batch, memory_limit)
        degrees = in_context(self.settled(degrees), stack)
        program, plan = self.lowered(
            degrees, cluster, stack, policy=policy, memory_limit=memory_limit, first_layers=first_layers
        )
        costs = priced(CostModel(cluster, policy, stack), profile)
        timeline = simulate(program, costs, trace=trace)
        plan = replace(simulated(plan, timeline, self._folded(degrees), costs), objective=timeline.step_seconds)
        whole = whole_by_degrees(degrees, self._folded(degrees)) if degrees.zero and degrees.data > 1 else 0.0
        return Prediction(degrees, plan, program, timeline, whole)

    def lowered(
        self,
        degrees: Degrees,
        cluster: Cluster,
        stack: Stack = IDEAL,
        *,
        policy: DtypePolicy = MIXED,
        memory_limit: float | None = None,
        first_layers: int = 0,
    ) -> tuple[Program, Plan]:
        """Return the plan of degrees and its program; arguments and errors as of `predict`."""
        folded = self._folded(degrees)
        plan = self.planned(
            degrees, cluster, stack, policy=policy, memory_limit=memory_limit, first_layers=first_layers
        )
        program = lower(plan, folded, CostModel(cluster, policy, kernels(stack)))
        if self.verify:
            verify_program(program, folded, self._rules_of(degrees.samples, folded))
        return program, plan

    def planned(
        self,
        degrees: Degrees,
        cluster: Cluster,
        stack: Stack = IDEAL,
        *,
        policy: DtypePolicy = MIXED,
        memory_limit: float | None = None,
        first_layers: int = 0,
    ) -> Plan:
        """Return the plan of degrees; arguments and errors as of `predict`."""
        degrees, folded = in_context(self.settled(degrees), stack), self._folded(degrees)
        if degrees.cp > 1 and self.workload.has_caches:
            raise JobError(
                f"cp {degrees.cp} would split the caches of a step of decoding by tokens, which no op here does: "
                "parts of the softmax would have to be merged",
                hint="leave cp at 1; tp splits caches by heads, dp by samples",
            )
        costs = CostModel(cluster, policy, kernels(stack))
        rules = self._rules_of(degrees.samples, folded)
        job = make_job(self.workload, degrees.gpus, degrees.global_batch, cluster, stack, policy, memory_limit)
        placing = placing_by_degrees(degrees)

        def placed(number: int) -> Draft:
            """Return a draft with the first of the tactics applied: those of all ZeRO stages go on from the same."""
            key = (degrees.samples, mesh_by_degrees(degrees), placing[:number], cluster, policy, kernels(stack))
            if key not in self._placed:
                if number:
                    found = placed(number - 1).again(job, degrees.num_microbatches)
                    found.decide(placing[number - 1])
                else:
                    found = Draft(
                        folded, rules, mesh_by_degrees(degrees), costs,
                        model=self.workload.info(), job=job, batch=self.workload.batch_dims(degrees.samples),
                        num_microbatches=degrees.num_microbatches,
                    )  # fmt: skip
                self._placed[key] = found
            return self._placed[key]

        draft = placed(len(placing)).again(job, degrees.num_microbatches)
        for tactic in stages_by_degrees(degrees, folded, first_layers):
            draft.decide(tactic)
        plan = draft.plan()
        if degrees.shares:
            plan = replace(plan, shares=degrees.row_shares)
        return summarise(plan, folded)

    def settled(self, degrees: Degrees) -> Degrees:
        """Return degrees with their defaults filled in.

        Defaults are the schedule of the mode, and the number of data-parallel devices that share what ZeRO splits.
        """
        degrees = degrees.in_mode(self.workload.mode)
        if not degrees.zero or degrees.shard or not degrees.may_share_apart:
            return degrees
        key = degrees.data, degrees.tp
        if key not in self._sharing:
            folded = self.workload.folded(self.workload.fixed_batch or _ANY_BATCH)
            self._sharing[key] = sharing_devices(degrees, folded)
        return replace(degrees, shard=self._sharing[key])

    def _folded(self, degrees: Degrees) -> Folded:
        fixed = self.workload.fixed_batch
        if fixed is not None and fixed != degrees.samples:
            raise JobError(
                f"the model works on {fixed} samples at a time, dp {degrees.dp} x microbatch {degrees.microbatch} "
                f"is {degrees.samples}",
                hint=f"choose dp x microbatch = {fixed}",
            )
        return self.workload.folded(degrees.samples, degrees.num_microbatches)

    def _rules_of(self, samples: int, folded: Folded) -> Rules:
        if samples not in self._rules:
            self._rules[samples] = rules_for(folded, self.rules)
        return self._rules[samples]


def in_context(degrees: Degrees, stack: Stack) -> Degrees:
    """Return degrees with the kind of context parallelism that a stack runs, where they do not state one."""
    return degrees if degrees.cp == 1 or degrees.cp_kind else replace(degrees, cp_kind=stack.context)


def kernels(stack: Stack) -> Stack:
    """Return what placements and programs know of a stack: which kernels there are, and none of its numbers."""
    return replace(
        IDEAL,
        attention=stack.attention,
        loss=stack.loss,
        selective=stack.selective,
        recompute_modules=stack.recompute_modules,
        recompute_among=stack.recompute_among,
        uneven=stack.uneven,
        dropout=stack.dropout,
        gathers=stack.gathers,
    )


def predict(
    model: str | Path,
    degrees: Degrees,
    *,
    cluster: str | Path | Cluster = "h100",
    stack: str | Path | Stack = NEAREST,
    mode: str = "train",
    dims: Mapping[str, DimSize] | None = None,
    memory_limit: float | None = None,
    loss: str = "auto",
    optimizer: str = "adam",
    sync_batchnorm: bool = False,
    lora: str | Path | Lora | None = None,
    precision: str = "mixed",
    recompute_modules: tuple[str, ...] = (),
    shared_expert_overlap: bool | None = None,
    first_layers: int = 0,
    profile: str | Path | Profile | None = None,
    cache_dir: str | Path | None = None,
    trace: bool = False,
) -> Prediction:
    """Return what a plan stated by degrees comes to: time of a step, where it goes, memory of every stage.

    A plan that does not fit into memory is predicted all the same; `Prediction.fits` tells. The number of devices is
    the product of the degrees.

    Args:
        model: Path of an ONNX file, or `zoo:NAME`.
        degrees: The plan.
        cluster: Preset name, YAML file or record.
        stack: What the software makes of the hardware: name, YAML file or record.
        mode: "train" or "infer".
        dims: Dynamic dims by name; for zoo models fields of the configuration.
        memory_limit: Bytes per device; None for most of the device's memory.
        loss: Loss of the training step.
        optimizer: Optimizer of the training step.
        sync_batchnorm: Whether devices that share a batch normalise it with statistics of all of it in training; else
            each with those of its own samples, as frameworks do by default.
        lora: Adapters to be trained in place of the model: "rank=16,targets=q:v", the path of peft's
            `adapter_config.json`, or a record; None for the one in the folder of a Hugging Face model, "none" for none.
        precision: What is stored in which precision, a key of `autopar.cost.POLICIES`.
        recompute_modules: Modules that selective recompute runs again, names of
            `autopar.recompute.RECOMPUTE_MODULES`; none for what the stack says.
        shared_expert_overlap: Whether tokens travel to experts and back beside the shared experts of their layer; None
            for what the stack says.
        first_layers: Layers of every stage, the first ones, that recompute; 0 for all.
        profile: Measured events that count in place of formulas: folder that `autopar profile` wrote, or a record;
            None for formulas alone.
        cache_dir: Where discovered rules are kept between runs; None to keep nothing.
        trace: Whether to collect the bars of a trace.

    Raises:
        AutoparError: If the model, the cluster, the stack or the degrees are wrong.
    """
    setting = open_setting(
        model,
        cluster=cluster,
        stack=stack,
        mode=mode,
        dims=dims,
        loss=loss,
        optimizer=optimizer,
        sync_batchnorm=sync_batchnorm,
        lora=lora,
        precision=precision,
        recompute_modules=recompute_modules,
        shared_expert_overlap=shared_expert_overlap,
        profile=profile,
        cache_dir=cache_dir,
    )
    return setting.predict(degrees, memory_limit=memory_limit, first_layers=first_layers, trace=trace)


@dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """What plans by degrees are predicted for.

    Attributes:
        predictor: The model.
        cluster: The hardware.
        stack: The software.
        policy: Bytes per element.
        profile: Measured events that count in place of formulas; None if there are none.
    """

    predictor: Predictor
    cluster: Cluster
    stack: Stack
    policy: DtypePolicy
    profile: Profile | None = None

    def predict(
        self, degrees: Degrees, *, memory_limit: float | None = None, first_layers: int = 0, trace: bool = False
    ) -> Prediction:
        """Return what a plan comes to; arguments and errors as of `predict`."""
        found = self.predictor.predict(
            degrees,
            self.cluster,
            self.stack,
            policy=self.policy,
            memory_limit=memory_limit,
            first_layers=first_layers,
            trace=trace,
            profile=self.profile,
        )
        check_work(found.plan, self.predictor.workload.folded(degrees.samples), found.degrees)
        remarks = tuple(Remark("request", text) for text in without_effect(found.degrees, degrees, found.plan))
        if not remarks:
            return found
        assert found.plan.simulated is not None, "it was simulated"
        told = replace(found.plan.simulated, remarks=(*remarks, *found.plan.simulated.remarks))
        return replace(found, plan=replace(found.plan, simulated=told))


def open_setting(
    model: str | Path,
    *,
    cluster: str | Path | Cluster = "h100",
    stack: str | Path | Stack = NEAREST,
    mode: str = "train",
    dims: Mapping[str, DimSize] | None = None,
    loss: str = "auto",
    optimizer: str = "adam",
    sync_batchnorm: bool = False,
    lora: str | Path | Lora | None = None,
    precision: str = "mixed",
    recompute_modules: tuple[str, ...] = (),
    shared_expert_overlap: bool | None = None,
    profile: str | Path | Profile | None = None,
    cache_dir: str | Path | None = None,
) -> Setting:
    """Return what plans of a model are predicted for; arguments and errors as of `predict`."""
    machine = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
    software = resolve_stack(stack, machine).recomputing(recompute_modules).overlapping_shared(shared_expert_overlap)
    workload = open_workload(
        model, mode=mode, dims=dims, loss=loss, optimizer=optimizer, sync_batchnorm=sync_batchnorm,
        fusion=software.fusion, lora=lora, cache_dir=cache_dir,
    )  # fmt: skip
    return Setting(Predictor(workload, cache_dir), machine, software, load_policy(precision), Profile.of(profile))


def without_effect(degrees: Degrees, asked: Degrees, plan: Plan) -> Iterator[str]:
    """Yield what was asked for and makes no difference to a plan by degrees, a sentence each.

    Args:
        degrees: The degrees with their defaults filled in.
        asked: The degrees as they were stated.
        plan: What became of them.
    """
    trains = plan.job.mode == "train"
    if degrees.zero and degrees.dp * degrees.cp == 1:
        yield f"ZeRO-{degrees.zero} has no effect: no two devices hold the same parameters (dp 1)"
    elif degrees.zero in (1, 2) and not trains:
        yield f"ZeRO-{degrees.zero} has no effect in inference: there are neither gradients nor optimizer state"
    if degrees.pp == 1 and asked.schedule not in ("", "1f1b", "forward-only"):
        yield f"schedule {asked.schedule} has no effect without a pipeline (pp 1)"
    if degrees.pp == 1 and degrees.interleave > 1:
        yield f"{degrees.interleave} stages per device have no effect without a pipeline (pp 1)"
    if degrees.pp_inside and "numbered" not in plan.job.cluster:
        yield "pipelines inside data parallelism have no effect on where devices lie: one node, pp 1 or dp 1"
    if degrees.recompute == Recompute.SELECTIVE and not any(block.selective for block in plan.blocks):
        yield "selective recompute has no effect: no op of the model is one that it runs again"


def check_work(plan: Plan, folded: Folded, degrees: Degrees) -> None:
    """Refuse degrees that leave all devices of an axis the same work, or a sequence whole that is to be split.

    Raises:
        JobError: If they do.
    """
    kinds = context_kinds(plan.mesh, plan.blocks, folded) if degrees.cp_kind == "ulysses" and degrees.tp > 1 else {}
    if kinds and not kinds["tp"]:
        raise JobError(
            f"tp {degrees.tp} splits no heads of {plan.model.name}, as cp {degrees.cp} splits them first",
            hint="choose tp x cp that divides query heads and key heads, or --cp-kind ring",
        )
    for found in roles_of_axes(plan.mesh, plan.blocks, folded):
        if found.axis.name == "tp" and degrees.sequence_parallel and not found.sequence_parallel:
            raise JobError(
                f"sequence parallelism splits nothing of {plan.model.name}: tp {degrees.tp} does not divide the "
                "positions of a sequence",
                hint="leave --sequence-parallel out, or choose a tp that divides the length of a sequence",
            )
        if found.role == "idle" and found.axis.size > 1:
            name, size = found.axis.name, found.axis.size
            raise JobError(
                f"{name} {size} splits nothing of {plan.model.name}: {size} devices would do the same work",
                hint=f"choose a {name} that divides {_DIVIDED[name]}, or 1",
            )
