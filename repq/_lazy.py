"Names that are loaded when they are first used (PEP 562), and names that have moved"
# plain Python: nothing to teach
import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from warnings import warn

# modules of version 0.1 -> where their names are now, most of them first; all this goes with 0.3
MOVED = dict(
    testing='tools.testing',
    files='tools.files',
    kernel='algebra.kernel fast.small_maps',
    norm='algebra.statistics algebra.batch_norm _old',
    branch='algebra.branch tools.drawing',
    quantizer='quantization.lsq fast.quantizer _old',
    layer='quantization.layer tools.drawing',
    qat='quantization.network quantization.wrapping reproduce.recipes',
    saving='quantization.files',
    graphs='adopt.regions quantization.wrapping quantization.network',
    foreign='adopt.foreign adopt.official',
    official='adopt.official',
    learner='train.learner train.doctor',
    operators='deploy.operators',
    parity='deploy.parity',
    small='fast.small_maps algebra.kernel',
    few='fast.separable',
    native='fast.native',
    weights='fast.weights quantization.layer algebra.branch',
    measuring='bench.timing tools.machine',
    records='reproduce.records tools.machine',
    training='reproduce.training',
    runs='reproduce.runs reproduce.training',
    driver='reproduce.driver reproduce.kernels reproduce.board',
    cluster='reproduce.cluster reproduce.executor',
    verify='reproduce.verify',
    evidence='reproduce.evidence',
    protocol='reproduce.protocol',
    statements='reproduce.statements',
    verdicts='reproduce.verdicts',
    formats='reproduce.formats tools.drawing',
    tables='reproduce.tables reproduce.report reproduce.figures reproduce.html_page reproduce.verdicts')

INSTEAD = {   # names of version 0.1 that have no successor of the same kind -> what to use
    'repq.qat.replace_object': 'repq.quantization.wrapping.replace_module',
    'repq.bench.paper_ratios': 'repq.reproduce.evidence.paper_times',
    'repq.runs.recipes': 'repq.reproduce.recipes.RECIPES',
    'repq.runs.MODELS': 'repq.reproduce.runs.CLASSIFIERS'}


def find_moved(package:str, name:str, modules, told:bool=False):
    "A name that `package` had before, from the first of some modules that has it; `told`: without a warning"
    for module in modules:
        if name.startswith('_') or name not in vars(import_module(module)): continue
        text = f'{package}.{name} is now {module}.{name}; the old name goes with 0.3'
        if not told: warn(text, DeprecationWarning, 3)
        return getattr(import_module(module), name)
    instead = INSTEAD.get(f'{package}.{name}')
    raise AttributeError(f'{package} has no {name!r}' + (f' any more: use {instead}' if instead else ''))


def lazy(
    package:str, # its dotted name
    moved=(),    # modules with names that the package showed in version 0.1, when it was a single module
    **names      # module of the package -> names to show from it
)->tuple: # __getattr__, __dir__, __all__
    "What a package's `__init__` needs to show names of its modules without loading them"
    home = {name: module for module, found in names.items() for name in found}
    everything = sorted({*names, *home})

    def __getattr__(name):
        if name in home: return getattr(import_module(f'{package}.{home[name]}'), name)
        if name in names: return import_module(f'{package}.{name}')
        try: return find_moved(package, name, moved)
        except AttributeError as e: raise AttributeError(f'{e}; it has {", ".join(everything)}') from None

    return __getattr__, lambda: everything, everything


class OldModule(ModuleType):
    "A module of version 0.1, which shows its names where they are now"
    def __getattr__(self, name):
        main = import_module(self._modules[0])
        if name == '__all__': return [n for m in self._modules for n in import_module(m).__all__]
        return find_moved(self.__name__, name, self._modules, told=name in vars(main))


class Moved(MetaPathFinder, Loader):
    "Finds modules under the names that they had in version 0.1, with a warning"
    def find_spec(self, fullname, path=None, target=None):
        package, _, name = fullname.partition('.')
        return ModuleSpec(fullname, self) if package == 'repq' and name in MOVED else None

    def create_module(self, spec):
        module = OldModule(spec.name)
        module._modules = [f'repq.{new}' for new in MOVED[spec.name.partition('.')[2]].split()]
        warn(f'{spec.name} is now {module._modules[0]}; the old name goes with 0.3', DeprecationWarning, 2)
        return module

    def exec_module(self, module): pass   # its names are looked up when they are asked for


sys.meta_path.insert(0, Moved())
