"Other people's networks"
from repq._lazy import lazy

__getattr__, __dir__, __all__ = lazy(
    __name__,
    regions=[],
    foreign=['convert'],
    official=['load_official'],
    expand_network=['expand'])
