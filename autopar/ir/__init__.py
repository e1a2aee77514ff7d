"""The IR: graphs of ONNX ops over typed values, their text form, their laws and their repeated blocks."""

from autopar.ir.graph import Attr, Graph, Op, Phase, Role, State, Value

__all__ = ["Attr", "Graph", "Op", "Phase", "Role", "State", "Value"]
