"LSQ, the layer, whole networks, files"
from repq._lazy import lazy

__getattr__, __dir__, __all__ = lazy(
    __name__,
    lsq=['LSQ', 'Quantizer', 'make_quantizer', 'use_compiled'],
    layer=['QuantLinear', 'RepConv2d'],
    network=['merge', 'parameter_groups', 'ptq', 'quantize', 'recalibrate'],
    files=['load', 'save'])
