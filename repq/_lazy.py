"Names that are loaded when they are first used (PEP 562), and modules that have moved"
# plain Python: nothing to teach
import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from warnings import warn


def lazy(
    package:str, # its dotted name
    **names      # module of the package -> names to show from it
)->tuple: # __getattr__, __dir__, __all__
    "What a package's `__init__` needs to show names of its modules without loading them"
    home = {name: module for module, found in names.items() for name in found}
    everything = sorted({*names, *home})

    def __getattr__(name):
        if name in home: return getattr(import_module(f'{package}.{home[name]}'), name)
        if name in names: return import_module(f'{package}.{name}')
        raise AttributeError(f'{package} has no {name!r}; it has {", ".join(everything)}')

    return __getattr__, lambda: everything, everything


class Moved(MetaPathFinder, Loader):
    "Finds modules under another name; with a warning where that name will go"
    def __init__(self, silent:dict, deprecated:dict): self.silent, self.deprecated = silent, deprecated

    def find_spec(self, fullname, path=None, target=None):
        known = fullname in self.silent or fullname in self.deprecated
        return ModuleSpec(fullname, self) if known else None

    def create_module(self, spec):
        name = self.silent.get(spec.name) or self.deprecated[spec.name]
        if spec.name in self.deprecated:
            warn(f'{spec.name} is now {name}; the old name goes with the next release', DeprecationWarning, 2)
        module = import_module(name)
        self.own = module.__spec__
        return module

    def exec_module(self, module): module.__spec__ = self.own   # the import system has put its own there
