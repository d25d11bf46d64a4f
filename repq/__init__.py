"Quantization-aware training for re-parametrized networks: RepQ, RepQ-BN and RepQ-BNEst"
from importlib import import_module
from ._lazy import forward

__version__ = "0.1.0"

# Everything is loaded when first used, so that `import repq.algebra.kernel` needs torch alone.
_names = {
    'algebra.kernel': ['Kernel'],
    'algebra.statistics': ['statistics_in'],
    'algebra.branch': ['Conv', 'Fixed', 'Identity', 'Norm', 'Scale', 'Seq', 'Sum', 'WeightNorm'],
    'quantization.lsq': ['LSQ', 'NoiseQuantizer', 'Quantizer', 'make_quantizer', 'use_compiled'],
    'quantization.layer': ['RepConv2d'],
    'quantization.network': ['merge', 'parameter_groups', 'ptq', 'quantize', 'recalibrate'],
    'quantization.files': ['load', 'save'],
    'adopt.foreign': ['convert'],
    'adopt.official': ['load_official'],
    'train.learner': ['QAT', 'QATDoctor'],
    'deploy.export': ['export_onnx'],
    'deploy.parity': ['check_parity'],
}
_rooms = ['tools', 'algebra', 'quantization', 'models', 'adopt', 'train', 'deploy', 'fast', 'reproduce', 'bench', 'cli']
_shortcuts = ['blocks', 'data']
_moved = {   # modules of version 0.1 -> where their names are now, most of them first
    'testing': 'tools.testing', 'files': 'tools.files', 'kernel': 'algebra.kernel', 'norm': 'algebra.statistics',
    'branch': 'algebra.branch tools.drawing', 'quantizer': 'quantization.lsq', 'layer': 'quantization.layer tools.drawing',
    'qat': 'quantization.network reproduce.recipes', 'saving': 'quantization.files', 'graphs': 'adopt.regions',
    'foreign': 'adopt.foreign adopt.official', 'official': 'adopt.official', 'learner': 'train.learner',
    'operators': 'deploy.operators', 'parity': 'deploy.parity', 'small': 'fast.small_maps', 'few': 'fast.separable',
    'native': 'fast.native', 'weights': 'fast.weights', 'measuring': 'bench.timing tools.machine', 'records': 'reproduce.records',
    'training': 'reproduce.training', 'runs': 'reproduce.runs reproduce.training', 'driver': 'reproduce.driver',
    'cluster': 'reproduce.cluster', 'verify': 'reproduce.verify', 'evidence': 'reproduce.evidence',
    'protocol': 'reproduce.protocol', 'statements': 'reproduce.statements', 'verdicts': 'reproduce.verdicts',
    'formats': 'reproduce.formats tools.drawing', 'tables': 'reproduce.tables'}

forward({f'{__name__}.{old}': [f'{__name__}.{new}' for new in now.split()] for old, now in _moved.items()})
_home = {name: module for module, names in _names.items() for name in names}
__all__ = [*_rooms, *_shortcuts, *_home]


def __getattr__(name):
    if name in _home: return getattr(import_module(f'{__name__}.{_home[name]}'), name)
    if name in (*_rooms, *_shortcuts, *_moved): return import_module(f'{__name__}.{name}')
    raise AttributeError(f'repq has no {name!r}; it has {", ".join(sorted(__all__))}')


def __dir__(): return sorted([*globals(), *__all__])
