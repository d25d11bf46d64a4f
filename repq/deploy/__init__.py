"ONNX, and the proof that it computes the same"
from repq._lazy import lazy

__getattr__, __dir__, __all__ = lazy(
    __name__,
    moved=['repq.deploy.export'],
    operators=[],
    targets=[],
    tensorrt=['check_tensorrt'],
    runtimes=['installed_runtimes', 'onnx_session', 'openvino_session', 'run_onnx'],
    export=['export_onnx'],
    parity=['check_parity'])
