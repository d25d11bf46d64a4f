"From specifications of runs to the paper's tables"
from repq._lazy import lazy

__getattr__, __dir__, __all__ = lazy(
    __name__,
    recipes=[],
    records=[],
    training=[],
    runs=[],
    cluster=[],
    executor=[],
    kernels=[],
    board=[],
    driver=[],
    verify=[],
    evidence=[],
    protocol=[],
    statements=[],
    verdicts=[],
    formats=[],
    html_page=[],
    run_pages=[],
    tables=[],
    figures=[],
    report=[],
    duration=[])
