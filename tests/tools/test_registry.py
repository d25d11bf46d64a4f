"Things by name: imported when first asked for, and never silent about a provider that is broken"
import subprocess, sys
import pytest
from repq.tools.registry import MODELS, Registry


@pytest.fixture
def provider(tmp_path, monkeypatch):
    "Write a module, and make it importable"
    monkeypatch.syspath_prepend(tmp_path)
    def write(name, text):
        (tmp_path/f'{name}.py').write_text(text)
        return name
    yield write
    for name in [n for n in sys.modules if n.startswith('provider_')]: del sys.modules[name]


def test_the_provider_is_imported_when_first_asked(provider):
    registry = Registry('shape', provider('provider_one', 'count = 1'))
    registry['square'] = 4
    assert 'provider_one' not in sys.modules
    assert registry['square'] == 4 and 'provider_one' in sys.modules
    with pytest.raises(KeyError, match="there is no shape 'circle', there are square"): registry['circle']


def test_a_missing_provider():
    for name in ('provider_nowhere', 'provider_nowhere.inside', 'repq.nowhere.inside'):
        assert dict(Registry('way', name, optional=True)) == {}
    with pytest.raises(ModuleNotFoundError): len(Registry('way', 'provider_nowhere'))


@pytest.mark.parametrize('optional', [False, True])
def test_a_broken_provider_is_an_error_each_time(provider, optional):
    registry = Registry('way', provider('provider_broken', 'import provider_nowhere'), optional)
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match='provider_nowhere'): len(registry)


def test_networks_are_found_by_name():
    from repq.models import build_model
    assert {'repvgg_a0', 'repvgg_b0', 'resnet18', 'ecbsr'} == set(MODELS)
    net = MODELS['ecbsr'](blocks=1, channels=4)
    assert net.hparams == build_model('ecbsr', blocks=1, channels=4).hparams


def test_files_reach_networks_without_importing_them_first():
    code = ('import sys, repq.quantization.files as f; assert "repq.models.networks" not in sys.modules\n'
            'f.build_skeleton(dict(name="ecbsr", blocks=1)); assert "repq.models.networks" in sys.modules')
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
