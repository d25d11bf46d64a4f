"LSQ, the layer, bits, ordinary layers, whole networks, files"
from repq._lazy import lazy

__getattr__, __dir__, __all__ = lazy(
    __name__,
    lsq=['LSQ', 'Quantizer', 'make_quantizer'],
    layer=['QuantLinear', 'RepConv2d'],
    bits=['RepNet', 'layer_bits', 'layers_of', 'set_mode'],
    wrapping=[],
    network=['merge', 'parameter_groups', 'ptq', 'quantize', 'recalibrate'],
    files=['load', 'save'])
