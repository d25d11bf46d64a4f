"Two statements of version 0.1 that were switches of the whole process; they go with 0.3"
# plain Python: nothing to teach
from dataclasses import replace
from warnings import warn
import torch
from repq.algebra.statistics import WAYS, check_dtype
from repq.tools.registry import Seam, choose_path

__all__ = ['statistics_in', 'use_compiled']
OLD_PATHS = {True: 'both', False: 'simple', 'native': 'fused', 'auto': 'auto'}


class Switch:
    "Switches when it is made; with `with` it switches back"
    def __enter__(self): return self
    def __exit__(self, *exc): self.back()


class use_compiled(Switch):
    "Choose the path; now `with repq.use_path('both')`, 'simple', 'fused' or 'auto'"
    def __init__(self, mode):
        if mode not in OLD_PATHS:
            raise ValueError(f"mode must be True, False, 'native' or 'auto', got {mode!r}")
        now = f'with repq.use_path({OLD_PATHS[mode]!r})'
        warn(f'repq.use_compiled({mode!r}) is now `{now}`; the old name goes with 0.3', DeprecationWarning, 2)
        self.before = Seam.path
        choose_path(OLD_PATHS[mode])

    def back(self): choose_path(self.before)


class statistics_in(Switch):
    "The type in which exact statistics multiply; now for example `layer.statistics = Exact(torch.bfloat16)`"
    def __init__(self, dtype:torch.dtype):
        check_dtype(dtype)
        warn('repq.statistics_in(dtype) is now an argument of the statistics, such as layer.statistics = '
             'repq.algebra.Exact(torch.bfloat16); the old name goes with 0.3', DeprecationWarning, 2)
        self.before = dict(WAYS)
        WAYS.update({name: replace(way, dtype=dtype) for name, way in WAYS.items() if hasattr(way, 'dtype')})

    def back(self): WAYS.update(self.before)
