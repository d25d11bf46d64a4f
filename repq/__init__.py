"Quantization-aware training for re-parametrized networks: RepQ, RepQ-BN and RepQ-BNEst"
from importlib import import_module

__version__ = "0.1.0"

# Loaded when first used (PEP 562), so that `import repq.kernel` needs torch alone.
_modules = ['testing', 'kernel', 'norm', 'branch', 'quantizer', 'weights', 'layer', 'blocks', 'models', 'data', 'qat', 'operators', 'deploy', 'graphs', 'official', 'saving', 'foreign', 'learner', 'parity', 'training', 'runs', 'cluster', 'driver', 'evidence', 'protocol', 'statements', 'verdicts', 'formats', 'tables', 'bench', 'cli']
_names = dict(
    kernel=['Kernel'],
    norm=['statistics_in'],
    branch=['Conv', 'Fixed', 'Identity', 'Norm', 'Scale', 'Seq', 'Sum', 'WeightNorm'],
    quantizer=['LSQ', 'NoiseQuantizer', 'Quantizer', 'make_quantizer', 'use_compiled'],
    layer=['RepConv2d'],
    qat=['merge', 'parameter_groups', 'ptq', 'quantize', 'recalibrate'],
    deploy=['export_onnx'],
    official=['load_official'],
    saving=['load', 'save'],
    foreign=['convert'],
    parity=['check_parity'],
    learner=['QAT', 'QATDoctor'],
)
_home = {name: module for module, names in _names.items() for name in names}
__all__ = [*_modules, *_home]


def __getattr__(name):
    if name in _modules: return import_module(f'repq.{name}')
    if name in _home: return getattr(import_module(f'repq.{_home[name]}'), name)
    raise AttributeError(f'repq has no {name!r}; it has {", ".join(sorted(__all__))}')


def __dir__(): return sorted([*globals(), *__all__])
