"Blocks, networks, what they cost"
from repq._lazy import lazy

__getattr__, __dir__, __all__ = lazy(
    __name__,
    blocks=['BLOCKS', 'make_block'],
    networks=['MODELS', 'RepVGG', 'build_model', 'cost', 'draw_net', 'ecbsr', 'layer_bits', 'layers_of', 'output_shapes', 'repvgg_a0', 'repvgg_b0', 'resnet18', 'set_mode'])
