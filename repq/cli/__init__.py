"The `repq` command"
from repq._lazy import lazy

__getattr__, __dir__, __all__ = lazy(
    __name__,
    moved=['repq.cli.command'],
    command=['main'])
