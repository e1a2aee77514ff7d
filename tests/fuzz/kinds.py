"""What is fuzzed: per kind the files that are mutated and the commands that read them."""

import gzip
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from tests.fuzz import edges, formats, lines, octets, protos, right, trees
from tests.fuzz.cases import Case, Maker, Seeds

_BYTES = 0.15
"""Share of cases in which bytes are changed and not the structure."""
_MANY_LAYERS = re.compile(rb'"(num_hidden_layers|n_layer)": [1-9]\d{1,3}\b')
Writer = Callable[[Any], bytes]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of input.

    Attributes:
        make: Makes a case.
        share: How often it is drawn beside the others; heavy ones seldom.
        packages: What it needs that is no dependency of the program.
    """

    make: Maker
    share: float = 1.0
    packages: tuple[str, ...] = ()


def _file(random: Random, tree: Any, write: Writer) -> bytes:
    """Return a file that is nearly the tree's."""
    if random.random() < _BYTES:
        return octets.mutated(random, write(tree))
    return write(trees.mutated(random, tree))


def _plan(random: Random, seeds: Seeds) -> Case:
    plans = [name for name in seeds if name.startswith("plan")]
    right_plan = seeds[random.choice(plans)]
    data = _file(random, json.loads(right_plan), formats.as_json)
    command = random.choice(right.PLAN_COMMANDS)
    return Case(command, {"plan.json": data, "other.json": right_plan})


def _program(random: Random, seeds: Seeds) -> Case:
    text = seeds[random.choice(list(right.SEED_PROGRAMS))]
    data = octets.mutated(random, text) if random.random() < _BYTES else lines.mutated(random, text)
    return Case(random.choice(right.PROGRAM_COMMANDS), {"program.txt": data})


def _of_yaml(name: str, files: Mapping[str, Any], commands: tuple[tuple[str, ...], ...]) -> Maker:
    """Return what makes cases of a YAML file."""

    def make(random: Random, seeds: Seeds) -> Case:
        tree = files[random.choice(list(files))]
        return Case(random.choice(commands), {name: _file(random, tree, formats.as_yaml), **_plans(seeds)})

    return make


def _plans(seeds: Seeds) -> dict[str, bytes]:
    return {"plan.json": seeds["plan-dp"]}


def _problem(random: Random, seeds: Seeds) -> Case:
    data = _file(random, right.PROBLEM, formats.as_json)
    if random.random() < 0.2:
        data = octets.mutated(random, gzip.compress(data)) if random.random() < 0.5 else gzip.compress(data)
    solver = random.choice(("portfolio", "beam", "local-search"))
    return Case(("select", "problem.json", "10", "--threads", "1", "--solver", solver), {"problem.json": data})


def _job(random: Random, seeds: Seeds) -> Case:
    data = _file(random, right.JOB, formats.as_toml)
    return Case(("--job", "job.toml", random.choice(("predict", "clusters", "predict"))), {"job.toml": data})


def _import(random: Random, seeds: Seeds) -> Case:
    framework = random.choice(list(right.CONFIGURATIONS))
    write, configurations, arguments = right.CONFIGURATIONS[framework]
    data = _file(random, random.choice(configurations), write)
    return Case(("import", "config", "--from", framework, *arguments), {"config": data})


def _hugging_face(random: Random, seeds: Seeds) -> Case:
    config = random.choice(right.HUGGING_FACE)
    data = _file(random, config, formats.as_json)
    if _MANY_LAYERS.search(data):  # right, but PyTorch's exporter takes minutes
        data = formats.as_json(config)
    return Case(("predict", "hf:config.json", *right.SMALL_JOB), {"config.json": data})


def _onnx(random: Random, seeds: Seeds) -> Case:
    data, others = protos.mutated(random)
    command = random.choice(right.MODEL_COMMANDS)
    return Case(command, {"model.onnx": data, **others})


def _arguments(random: Random, seeds: Seeds) -> Case:
    words = list(random.choice(right.COMMANDS))
    for _ in range(random.choice((1, 1, 2))):
        place = random.randrange(len(words))
        match random.randrange(6):
            case 0:
                del words[place]
            case 1:
                words.insert(place, words[random.randrange(len(words))])
            case 2:
                words.insert(place, random.choice(right.OPTIONS))
            case _:
                words[place] = _word(random, words[place])
        words = words or ["predict"]
    return Case(tuple(words), {**_plans(seeds), "pins.yaml": b"pin: {stages: 1}\n"})


def _word(random: Random, old: str) -> str:
    """Return another word in place of one that is typed; no word holds a zero byte."""
    new = edges.akin(random, float(old) if old.isdecimal() else old)
    name, separator, _ = old.partition("=")
    text = f"{name}={new}" if separator and random.random() < 0.7 else str(new)
    return text.replace("\x00", "")


_YAML = {
    "cluster": _of_yaml("cluster.yaml", right.CLUSTERS, right.CLUSTER_COMMANDS),
    "stack": _of_yaml("stack.yaml", right.STACKS, right.STACK_COMMANDS),
    "pins": _of_yaml("pins.yaml", right.PINS, right.PIN_COMMANDS),
    "tactics": _of_yaml("tactics.yaml", right.TACTICS, right.TACTIC_COMMANDS),
}
KINDS: Mapping[str, Kind] = {
    "onnx": Kind(_onnx, 3),
    "plan": Kind(_plan, 3),
    "program": Kind(_program, 2),
    "cluster": Kind(_YAML["cluster"], 2),
    "stack": Kind(_YAML["stack"], 1),
    "pins": Kind(_YAML["pins"], 0.5),
    "tactics": Kind(_YAML["tactics"], 1),
    "iopddl": Kind(_problem, 0.5),
    "toml": Kind(_job, 1),
    "import": Kind(_import, 3),
    "hf": Kind(_hugging_face, 0.2, ("torch", "transformers", "onnxscript")),
    "cli": Kind(_arguments, 2),
}
"""Every kind by the name it has on the command line."""
