"Blocks, networks, what they cost"
from repq._lazy import lazy

__getattr__, __dir__, __all__ = lazy(
    __name__,
    moved=['repq.models.networks', 'repq.models.costs', 'repq.quantization.bits'],
    blocks=['BLOCKS', 'make_block'],
    networks=['MODELS', 'RepVGG', 'build_model', 'draw_net', 'ecbsr', 'repvgg_a0', 'repvgg_b0', 'resnet18'],
    costs=['cost', 'output_shapes'],
    mixed_bits=['allocate', 'sensitivity'],
    inspection=['inspect'])
