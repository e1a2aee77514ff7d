"""ONNX texts of the functions of domain `autopar`, by subject; `autopar.ir.functions` collects them."""
