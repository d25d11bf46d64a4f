"Writing files, comparing tensors, registries, drawing, text tables, the machine"
from repq._lazy import lazy

__getattr__, __dir__, __all__ = lazy(
    __name__,
    files=['write_json', 'write_whole'],
    testing=['assert_same'],
    registry=['Registry'],
    drawing=['Picture', 'row'],
    text_tables=['html_table', 'markdown_table', 'text_table'],
    machine=['environment'])
