"Quantization-aware training for re-parametrized networks: RepQ, RepQ-BN and RepQ-BNEst"
from importlib import import_module
from ._lazy import MOVED

__version__ = "0.2.0"

# Everything is loaded when first used, so that `import repq.algebra.kernel` needs torch alone.
_names = {
    'algebra.kernel': ['Kernel'],
    'tools.registry': ['use_path'],
    'algebra.statistics': ['Calibrated', 'Estimated', 'Exact', 'Sampled'],
    'algebra.branch': ['Conv', 'Fixed', 'Identity', 'Norm', 'Scale', 'Seq', 'Sum', 'WeightNorm'],
    'quantization.lsq': ['LSQ', 'NoiseQuantizer', 'Quantizer', 'make_quantizer'],
    'quantization.layer': ['RepConv2d'],
    'quantization.network': ['merge', 'parameter_groups', 'ptq', 'quantize', 'recalibrate'],
    'quantization.files': ['load', 'save'],
    'models.mixed_bits': ['allocate', 'sensitivity'],
    'models.inspection': ['inspect'],
    'adopt.foreign': ['convert'],
    'adopt.official': ['load_official'],
    'adopt.expand_network': ['expand'],
    'train.learner': ['QAT'],
    'train.doctor': ['QATDoctor'],
    'deploy.tensorrt': ['check_tensorrt'],
    'deploy.export': ['export_onnx'],
    'deploy.parity': ['check_parity'],
    '_old': ['statistics_in', 'use_compiled'],
}
_rooms = 'tools algebra quantization models adopt train deploy fast reproduce bench cli'.split()
_shortcuts = ['blocks', 'data']
_home = {name: module for module, names in _names.items() for name in names}
__all__ = [*_rooms, *_shortcuts, *_home]


def __getattr__(name):
    if name in _home: return getattr(import_module(f'{__name__}.{_home[name]}'), name)
    if name in (*_rooms, *_shortcuts, *MOVED): return import_module(f'{__name__}.{name}')
    raise AttributeError(f'repq has no {name!r}; it has {", ".join(sorted(__all__))}')


def __dir__(): return sorted([*globals(), *__all__])
