"Names of version 0.1: those of package, README and tutorials still work, others for one more release"
import json, os, re, subprocess, sys, warnings
from importlib import import_module
from pathlib import Path
import pytest
import repq
from repq._lazy import INSTEAD, MOVED

ROOT = Path(__file__).parent.parent

# what `import repq` offered in version 0.1
TOP = '''Kernel statistics_in Conv Fixed Identity Norm Scale Seq Sum WeightNorm LSQ NoiseQuantizer Quantizer
make_quantizer use_compiled RepConv2d merge parameter_groups ptq quantize recalibrate export_onnx
load_official load save convert check_parity QAT QATDoctor'''.split()

# its modules
MODULES = '''testing kernel norm branch quantizer weights layer blocks models data qat operators deploy graphs
official saving foreign learner parity training runs cluster driver evidence protocol statements verdicts
formats tables bench cli'''.split()

# what the README and the tutorials of version 0.1 used of modules that keep their names
USED = dict(
    blocks='BLOCKS repvgg plain qarepvgg acnet orepa ecb dbb mobileone expandnet diracnet',
    models='repvgg_a0 repvgg_b0 resnet18 ecbsr cost',
    data='''cifar10_dls digits_dls SRBenchmark bicubic_baseline evaluate_sr find_data imresize photo_dls
            photos psnr_y sr_train_dls scoring_loader''')

# the same for modules that are renamed, or that are rooms now
OLD = dict(
    kernel='compose convolve laplacian',
    norm='estimate_moments moments',
    testing='assert_differs assert_modes_agree assert_same randomize_bn',
    qat='recalibrate RECIPES STRATEGIES layer_bits',
    quantizer='use_compiled',
    training='adam Workspace finish',
    driver='open_executor run_batch reproduce',
    runs='PROFILES SEEDS Store cells graph limited read_record super_resolution load_network data_of',
    tables='Results claims count_verdicts report_tables STYLE bits_figure claims_html time_figure',
    measuring='measured_where read_bench record_markdown targets_markdown environment cpu_model',
    branch='Picture box chain fan draw',
    layer='RepConv2d join row draw_layer',
    formats='Table Chart figure nice_ticks',
    learner='QAT QATDoctor variance_error', graphs='find_regions share_conv', foreign='convert load_official',
    files='write_whole write_json', saving='save load',
    bench='bench_step STEP_TARGETS interleaved environment conditions keep_memory',
    deploy='onnx_session run_onnx export_onnx', cli='main',
    models='RepNet layers_of set_mode layer_bits raise_bits output_shapes RepVGG build_model MODELS draw_net')


@pytest.mark.parametrize('name', TOP)
def test_top_level_names(name):
    assert name in repq.__all__ and callable(getattr(repq, name))


@pytest.mark.parametrize('module', USED)
def test_names_that_stay(module):
    "Found as before, without a warning"
    with warnings.catch_warnings():
        warnings.simplefilter('error', DeprecationWarning)
        found = import_module(f'repq.{module}')
        assert getattr(repq, module) is found
        for name in USED[module].split(): assert getattr(found, name) is not None, name


def test_data_has_everything():
    from repq.train import images, super_resolution
    assert repq.data.FollowEpoch is images.FollowEpoch and repq.blocks is repq.models.blocks
    names = set(repq.data.__all__)
    assert names == {*images.__all__, *super_resolution.__all__} and len(names) > 60


@pytest.mark.parametrize('module', OLD)
def test_names_that_moved(module):
    "Found for one more release; a warning says where they are now, and there they are"
    if module in MOVED: sys.modules.pop(f'repq.{module}', None)   # it is the import that warns
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        old = import_module(f'repq.{module}')
        found = {name: getattr(old, name) for name in OLD[module].split()}
    messages = [str(w.message) for w in caught if w.category is DeprecationWarning]
    shown = set(old.__all__)   # of a room: what it offers without a warning
    if module in MOVED:
        home = MOVED[module].split()[0]
        assert messages.pop(0).startswith(f'repq.{module} is now repq.{home};')
        shown = set(dir(import_module(f'repq.{home}')))
    moved = dict(re.match(r'repq\.\w+\.(\w+) is now (repq\.[\w.]+)\.', m).groups() for m in messages)
    assert set(moved) == set(found) - shown
    for name, place in moved.items(): assert getattr(import_module(place), name) is found[name]


def test_all_modules_are_there():
    rooms, moved = set(repq._rooms), set(MOVED)
    assert set(MODULES) <= rooms | moved | set(repq._shortcuts) and not moved & (rooms | set(repq._shortcuts))
    for now in MOVED.values():
        for module in now.split(): assert (ROOT/'repq'/f'{module.replace(".", "/")}.py').exists(), module


def test_the_warning_names_the_line_of_the_user(tmp_path):
    script = tmp_path/'of_the_user.py'
    script.write_text('import repq.files\nfrom repq.models import raise_bits\nfrom repq.qat import RECIPES\n')
    command = [sys.executable, '-W', 'always::DeprecationWarning', str(script)]
    env = {**os.environ, 'PYTHONPATH': str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr
    for line, words in ((1, 'repq.files is now repq.tools.files'), (2, 'repq.quantization.bits.raise_bits'),
                        (3, 'repq.reproduce.recipes.RECIPES')):
        wanted = rf'of_the_user.py:{line}: DeprecationWarning: .*{re.escape(words)}'
        assert re.search(wanted, done.stderr), done.stderr


def test_removed_names_say_what_to_use():
    for old, new in INSTEAD.items():
        module, name = old.rsplit('.', 1)
        expected = pytest.raises(AttributeError, match=f'any more: use {re.escape(new)}')
        with warnings.catch_warnings(), expected:
            warnings.simplefilter('ignore')
            getattr(import_module(module), name)
        place, name = new.rsplit('.', 1)
        assert hasattr(import_module(place), name)
    with pytest.raises(AttributeError, match="repq.deploy has no 'nonsense'; it has .*export_onnx"):
        repq.deploy.nonsense


def test_star_and_pickle_find_old_modules():
    "`from repq.kernel import *`, and what was pickled by version 0.1"
    import pickle
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        here = {}
        exec('from repq.kernel import *', here)
        assert here['compose'] is import_module('repq.algebra.kernel').compose
        assert pickle.loads(b'crepq.layer\nRepConv2d\n.') is repq.RepConv2d
        assert pickle.loads(b'crepq.models\nRepVGG\n.') is repq.models.RepVGG


def sources():
    "Everything of ours that mentions modules: notebooks, tests, texts"
    own = [*(ROOT/'nbs').rglob('*.ipynb'), *ROOT.glob('*.md'), *(ROOT/'tests').rglob('*.py'), ROOT/'Makefile']
    for path in own:
        if path == Path(__file__): continue
        text = path.read_text(encoding='utf-8')
        if path.suffix == '.ipynb': text = '\n'.join(''.join(c['source']) for c in json.loads(text)['cells'])
        yield path, text


def test_nothing_of_ours_uses_an_old_name():
    old = '|'.join(MOVED)
    for path, text in sources():
        found = re.findall(rf'\brepq\.(?:{old})\b(?! *=)', text)
        found += re.findall(rf'from repq import [^\n]*\b(?:{old})\b', text)
        assert not found, f'{path}: {found}'
