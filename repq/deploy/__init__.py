"ONNX, and the proof that it computes the same"
from repq._lazy import lazy

__getattr__, __dir__, __all__ = lazy(
    __name__,
    moved=['repq.deploy.export'],
    operators=[],
    export=['export_onnx'],
    parity=['check_parity'])
