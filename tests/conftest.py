"Options, and the count of random expressions in the closing summary"
import pytest, torch

PROVEN = {}   # what was proven on how many random cases: filled by tests, printed at the end


def pytest_addoption(parser):
    parser.addoption('--slow', action='store_true', help='the long versions: 10,000 random expressions instead of 200')


def pytest_terminal_summary(terminalreporter):
    for what, n in PROVEN.items(): terminalreporter.write_line(f'{what}: {n}')


@pytest.fixture(autouse=True)
def seed(): torch.manual_seed(0)
