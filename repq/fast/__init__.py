"Faster forms of functions: nothing here changes a result"
from repq._lazy import lazy

__getattr__, __dir__, __all__ = lazy(
    __name__,
    small_maps=[],
    separable=[],
    quantizer=[],
    native=[],
    merging=[],
    weights=[])
