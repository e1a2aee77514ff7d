"""The MLPs of DistIR (Santhanam et al. 2021): square products with a ReLU after each, without biases."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopar.models import layers
from autopar.models.builder import Builder
from autopar.models.spec import ModelSpec

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True, slots=True)
class MlpConfig:
    """Hyperparameters of an MLP.

    Attributes:
        num_layers: Products.
        hidden: Width of input, output and everything between.
    """

    num_layers: int
    hidden: int

    @property
    def sample_size(self) -> int:
        """Features of a row."""
        return self.hidden


def build(name: str, config: MlpConfig) -> "onnx.ModelProto":
    """Return the graph from `rows` float32 [batch, hidden] to `logits` [batch, hidden], which have no ReLU."""
    g = Builder(name)
    x = g.input("rows", ("batch", config.hidden))
    last = config.num_layers - 1
    for index in range(last):
        product = layers.linear(g, x, f"layers.{index}", config.hidden, config.hidden, bias=False)
        x = g.op("Relu", product, name=f"layers.{index}.relu")
    weight = g.parameter(f"layers.{last}.weight", (config.hidden, config.hidden), f"normal {config.hidden**-0.5:.6g}")
    g.op("MatMul", x, weight, name="logits")
    return g.model({"logits": ("batch", config.hidden)})


# 1B, 17B and 103B from small to large. DistIR sweeps the batch over powers of two up to 2**15; here a quarter of that.
_SOURCE = "Santhanam et al. 2021 (DistIR); github.com/microsoft/dist-ir"


def _spec(name: str, config: MlpConfig) -> ModelSpec:
    return ModelSpec(name, "mlp", config.num_layers * config.hidden**2, 8192, "row", _SOURCE, config)


SPECS = (
    _spec("mlp-xs", MlpConfig(8, 512)),
    _spec("mlp-small", MlpConfig(16, 8192)),
    _spec("mlp-medium", MlpConfig(64, 16384)),
    _spec("mlp-large", MlpConfig(96, 32768)),
)
"""All MLPs."""
