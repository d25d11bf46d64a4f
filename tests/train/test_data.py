"Data: the known scores of bicubic, epochs that can be resumed, real trainings, and helpful errors"
import math, os, pickle, subprocess, sys, warnings, zipfile
from pathlib import Path
import pytest, torch
from torch import nn
from PIL import Image
from repq import data as D
from repq.tools.testing import assert_same

ROOT = Path(__file__).parents[2]
warnings.simplefilter('ignore', FutureWarning)


def data_folder():
    "The folder of data sets: REPQ_DATA, or shared/data beside the repository"
    return next((p for p in (Path(os.environ.get('REPQ_DATA') or '/nonexistent'),
                             ROOT.parent/'shared'/'data') if p.is_dir()), None)


def needs(name):
    "Skip where a data set is absent"
    root = data_folder()
    there = root and any((root/n).exists() for n in (name, f'{name}.zip'))
    return pytest.mark.skipif(not there, reason=f'{name} is neither in REPQ_DATA nor in ../shared/data')


@pytest.fixture(scope='session')
def cache(tmp_path_factory): return tmp_path_factory.mktemp('cache')


def save(img, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((img.permute(1, 2, 0) if img.ndim == 3 else img).numpy()).save(path)
    return path


def noise(*shape): return torch.randint(0, 256, shape, dtype=torch.uint8)


def folder(root, train='ab', test='ab', size=(32, 32), n=8):
    for split, labels in [('train', train), ('test', test)]:
        for label in labels:
            for i in range(n): save(noise(3, *size), root/split/label/f'{i}.png')
    return root


def inputs(loader): return torch.cat([torch.Tensor(x) for x, _ in loader])


def quiet(learn, *args, **kwargs):
    with learn.no_bar(), learn.no_logging(): learn.fit(*args, **kwargs)


def learner(dls, net=None, **kwargs):
    import fastai.callback.progress  # noqa: F401 (adds no_bar)
    from fastai.learner import Learner
    from fastai.metrics import accuracy
    net = net or nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1),
                               nn.BatchNorm2d(32), nn.ReLU(),
                               nn.Flatten(), nn.Linear(512, 10))
    return Learner(dls, net, metrics=accuracy, **kwargs)


# Import

def test_import_loads_torch_alone():
    code = '''
import sys, torch
before = set(sys.modules)
import repq.data
print(*{m.split(".")[0] for m in set(sys.modules) - before})
'''
    loaded = set(subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True,
                                cwd=ROOT).stdout.split())
    assert not loaded & {'fastai', 'torchvision', 'PIL', 'skimage', 'sklearn', 'matplotlib'}


def test_lazy_classes():
    assert D.MemoryLoader is D.fastai_class('MemoryLoader')
    assert D.FollowEpoch.__module__ == 'repq.train.images'
    with pytest.raises(AttributeError, match='nonsense'): D.nonsense


# Super-resolution on the real sets

@pytest.mark.parametrize('name, psnr', [('Set5', 33.7), ('Set14', 30.3), ('B100', 29.6),
                                        ('Urban100', 26.9)])
def test_bicubic_scores_what_it_always_scores(name, psnr, cache):
    root = data_folder()
    if not root or not (root/'sr/benchmark'/name).is_dir():
        pytest.skip(f'sr/benchmark/{name} is neither in REPQ_DATA nor in ../shared/data')
    bench = D.SRBenchmark(D.find_data(f'sr/benchmark/{name}', root), 2, cache=cache)
    assert abs(D.bicubic_baseline(bench, ssim=False)['psnr'] - psnr) < .05


@needs('sr/BSDS400')
def test_bsds_patches(cache):
    source = D.find_data('sr/BSDS400', data_folder())
    dls = D.sr_train_dls(source, patch=48, batch_size=8, steps_per_epoch=3, cache=cache)
    assert len(dls.train.dataset.small) == 380 and len(dls.valid.dataset.small) == 20
    assert [tuple(t.shape) for t in dls.one_batch()] == [(8, 1, 48, 48), (8, 1, 96, 96)]
    assert all(100 < t.max() <= 235 and t.min() >= 16 for t in dls.one_batch()), 'luma in 0..255'
    with pytest.raises(ValueError,
                       match=r'BSDS400/\d+ is 160×240 when small, the patch is 200×200: choose patch=160'):
        D.sr_train_dls(source, patch=200, cache=cache)


@needs('cifar10')
def test_cifar10(cache):
    import time
    dls = D.cifar10_dls(data_folder(), n_train=5000, n_valid=1000, cache=cache)
    assert dls.c == 10 and dls.vocab[0] == 'airplane' and dls.train.dataset.y.bincount().tolist() == [500]*10
    start = time.time()
    dls = D.cifar10_dls(data_folder(), cache=cache)
    assert time.time() - start < 1, 'the second start reads the cache'
    assert len(dls.train.dataset) == 50_000 and len(dls.valid.dataset) == 10_000
    x = inputs(dls.valid)
    assert x.mean().abs() < .05 and abs(x.std() - 1) < .05


@needs('cifar10')
def test_held_out_images_of_cifar10(cache):
    "5,000 training images, 500 of each class, the same for every seed and size, and none of them trains"
    def loaders(**kw):
        return [l.dataset for l in D.cifar10_dls(data_folder(), cache=cache, held_out=5000, **kw).loaders]
    whole = D.cifar10_dls(data_folder(), cache=cache)
    train, held, test = loaders()
    assert [len(s) for s in (train, held, test)] == [45_000, 5_000, 10_000]
    assert held.y.bincount().tolist() == [500]*10
    assert torch.equal(test.x, whole.valid.dataset.x) and torch.equal(test.y, whole.valid.dataset.y)
    for kw in (dict(seed=7), dict(n_train=1000), dict(batch_size=32)):
        assert torch.equal(loaders(**kw)[1].x, held.x)
    def seen(*sets): return sorted(hash(img.numpy().tobytes()) for s in sets for img in s.x)
    assert seen(train, held) == seen(whole.train.dataset)
    assert held.pad == test.pad == 0 and not held.flip and train.pad == 4 and train.flip


def test_held_out_digits():
    dls = D.digits_dls(held_out=160)
    train, held, test = (l.dataset for l in dls.loaders)
    assert [len(s) for s in (train, held, test)] == [1280, 160, 357]
    assert max(held.y.bincount()) - min(held.y.bincount()) <= 2
    whole = D.digits_dls()
    assert torch.equal(test.x, whole.valid.dataset.x) and D.scoring_loader(dls).dataset is test
    assert D.scoring_loader(whole) is whole.valid
    refuses(ValueError, '1440 images to be held out of 1440', D.digits_dls, held_out=1440)


def test_both_arms_of_a_pair_see_the_same_images():
    "Whatever the network draws from the global generator: the same order, the same crops, in every epoch"
    def epochs(draws):
        dls, found = D.digits_dls(seed=3, held_out=160), []
        for _ in range(2):
            for batch in dls.train:
                torch.rand(draws)
                found.append(batch)
        return [torch.cat(t) for t in zip(*found)]
    for a, b in zip(epochs(1), epochs(1000)): assert torch.equal(a, b)


def test_a_flipped_bit_in_the_cache(tmp_path):
    make = lambda: {'x': torch.arange(100)}
    D.cached(make, 'a', 'k', tmp_path)
    path = D.cache_path('a', 'k', tmp_path)
    content = bytearray(path.read_bytes())
    content[-100] ^= 4
    path.write_bytes(content)
    with pytest.warns(UserWarning, match='a-k.safetensors is damaged .*digest.* it is made again'):
        assert torch.equal(D.cached(make, 'a', 'k', tmp_path)['x'], make()['x'])
    assert torch.equal(D.cached(lambda: 1/0, 'a', 'k', tmp_path)['x'], make()['x'])


# Epochs

SETS = dict(digits=lambda seed: D.digits_dls(seed=seed),
            photos=lambda seed: D.photo_dls(steps_per_epoch=4, seed=seed))


@pytest.mark.parametrize('make', SETS.values(), ids=SETS)
def test_an_epoch_is_a_function_of_seed_and_number(make):
    dls, rng = make(3), torch.get_rng_state()
    epochs = [inputs(dls.train) for _ in range(3)]
    assert dls.train.epoch == 3
    torch.rand(7)
    other = make(3)
    for e in (2, 0, 1):
        other.train.set_epoch(e)
        next(iter(other.train))
        other.one_batch()  # a broken-off epoch starts again
        assert_same(inputs(other.train), epochs[e], 0)
    assert not torch.equal(epochs[0], epochs[1]) and not torch.equal(inputs(make(4).train), epochs[0])
    assert_same(inputs(dls.valid), inputs(other.valid), 0)
    torch.set_rng_state(rng)
    before = torch.get_rng_state()
    inputs(dls.train)
    assert_same(torch.get_rng_state(), before, 0)
    assert_same(inputs(pickle.loads(pickle.dumps(dls.train))), inputs(dls.train), 0)


def test_augmentation_does_not_depend_on_batch_size():
    "Image n in epoch e looks the same in a batch of 1440 and in batches of 64"
    small, large = D.digits_dls(64, seed=5), D.digits_dls(1440, seed=5)
    assert_same(inputs(small.train), inputs(large.train)[:22*64], 0)


def test_distributed_halves_make_the_epoch():
    pytest.importorskip('accelerate', reason='fastai.distributed needs accelerate')
    from fastai.distributed import DistributedDL
    whole = inputs(D.digits_dls(60, seed=1).train)
    halves = []
    for rank in range(2):
        dl = DistributedDL(D.digits_dls(60, seed=1).train, rank=rank, world_size=2)
        dl._broadcast = lambda t, rank: t                     # one process plays both
        halves.append(inputs(dl))
    assert_same(torch.cat(halves), whole, 0)


def test_files_are_resumable_with_and_without_workers(tmp_path):
    source = folder(tmp_path/'f', n=6)
    def make(workers): return D.image_folder_dls(source, batch_size=4, size=24, num_workers=workers)
    one = make(0)
    epochs = [inputs(one.train) for _ in range(2)]
    two = make(2)
    two.train.set_epoch(1)
    assert_same(inputs(two.train), epochs[1], 0)
    assert not torch.equal(*epochs)


def test_follow_epoch_after_start_epoch():
    "fit(3) and fit(1) then fit(3, start_epoch=1) see the same batches"
    seen = []
    def run(learn, *args, **kwargs):
        from fastai.callback.core import Callback
        class See(Callback):
            def after_batch(self):
                if self.training: seen.append(self.x.sum().item())
        learn.add_cb(See())
        quiet(learn, *args, **kwargs)
    run(learner(D.digits_dls(360), cbs=D.FollowEpoch()), 3)
    whole, seen[:] = list(seen), []
    run(learner(D.digits_dls(360), cbs=D.FollowEpoch()), 1)
    run(learner(D.digits_dls(360), cbs=D.FollowEpoch()), 3, start_epoch=1)
    assert seen == whole and len(whole) == 12


# Trainings

def test_digits_train_far_above_chance():
    learn = learner(D.digits_dls(32), lr=3e-3)
    quiet(learn, 2)
    with learn.no_bar(): assert learn.validate()[1] > .8


@pytest.mark.parametrize('kwargs, shape',
                         [({}, (1, 8, 8)), (dict(size=32, channels=3), (3, 32, 32)),
                          (dict(size=16, augment=False), (1, 16, 16))])
def test_digits_sizes(kwargs, shape):
    x, y = D.digits_dls(**kwargs).one_batch()
    assert tuple(x.shape) == (64, *shape) and type(x) is torch.Tensor and y.dtype == torch.int64


def test_fastai_shows_interprets_and_exports(tmp_path):
    import matplotlib
    matplotlib.use('Agg')
    from fastai.interpret import ClassificationInterpretation
    from fastai.learner import load_learner
    learn = learner(D.digits_dls(size=8))
    quiet(learn, 1)
    with learn.no_bar():
        learn.dls.show_batch(unique=True)
        learn.show_results()
        interp = ClassificationInterpretation.from_learner(learn)
        assert interp.confusion_matrix().sum() == 357 and list(interp.vocab) == list('0123456789')
        interp.plot_confusion_matrix()
        learn.path = tmp_path
        learn.export('net.pkl')
    again = load_learner(tmp_path/'net.pkl')
    assert len(again.dls.train.dataset) == 1 and list(again.dls.vocab) == list('0123456789')


def test_files_train_and_export(tmp_path):
    from fastai.learner import load_learner
    net = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 2))
    learn = learner(D.image_folder_dls(folder(tmp_path/'set'), batch_size=4, size=24, num_workers=0), net)
    quiet(learn, 1)
    learn.path = tmp_path
    with learn.no_bar(): learn.show_results()
    learn.export('net.pkl')
    assert list(load_learner(tmp_path/'net.pkl').dls.vocab) == ['a', 'b']


def test_super_resolution_learns():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(1, 16, 5, padding=2), nn.PReLU(),
                                      nn.Conv2d(16, 4, 3, padding=1))
        def forward(self, x): return nn.functional.pixel_shuffle(self.body(x) + x, 2)
    learn = learner(D.photo_dls(steps_per_epoch=40), Net(), lr=5e-3)
    learn.metrics = []
    bench = D.SRBenchmark({'coffee': D.photos('test')['coffee'][:, 100:260, 200:400]})
    before = D.evaluate_sr(learn.model, bench)
    quiet(learn, 2)
    after = D.evaluate_sr(learn.model, bench)
    assert after['psnr'] > before['psnr'] + 1 and after['ssim'] > before['ssim']
    assert learn.model.training is False
    with learn.no_bar(): learn.show_results()


# Numbers

def test_sizes_of_imresize():
    x = torch.rand(2, 3, 30, 31)
    assert D.imresize(x, 1/2).shape == (2, 3, 15, 16) and D.imresize(x, .1).shape == (2, 3, 3, 4)
    assert D.imresize(x, 3).shape == (2, 3, 90, 93)
    assert_same(D.imresize(x, 1), x, 1e-6)
    assert D.imresize(noise(3, 5, 5), 2).dtype == torch.uint8
    with pytest.raises(ValueError, match='scale must be positive'): D.imresize(x, 0)


@pytest.mark.parametrize('prefix', ['', 'DIV2K_train_'])
@pytest.mark.parametrize('scale', [2, 3, 4])
def test_small_pictures_are_files(scale, prefix, tmp_path):
    "Pairs computed in memory equal pairs read from HR/ and LR_bicubic/, or from DIV2K's folders"
    img = noise(3, 50, 61)
    save(img, tmp_path/f'{prefix}HR/0001.png')
    h, w = 50//scale*scale, 61//scale*scale
    save(D.imresize(img[:, :h, :w], 1/scale), tmp_path/f'{prefix}LR_bicubic/X{scale}/0001x{scale}.png')
    (lr, hr), (lr2, hr2) = D.luma_pair(img, scale), D.luma_pairs(tmp_path, scale, cache=False)['0001']
    assert_same(lr, lr2, 0)
    assert_same(hr, hr2, 0)
    assert hr.shape == (1, h, w) and lr.shape == (1, h//scale, w//scale)


def test_cache_follows_its_source(tmp_path):
    save(noise(3, 20, 20), tmp_path/'set/HR/1.png')
    first = D.luma_pairs(tmp_path/'set', cache=tmp_path/'cache')['1'][1]
    save(noise(3, 22, 20), tmp_path/'set/HR/1.png')
    assert D.luma_pairs(tmp_path/'set', cache=tmp_path/'cache')['1'][1].shape == (1, 22, 20) != first.shape
    assert len(list((tmp_path/'cache').iterdir())) == 2 and not list((tmp_path/'set').glob('*.safetensors'))


def test_zip_equals_folder(tmp_path):
    source = folder(tmp_path/'cifar10')
    with zipfile.ZipFile(tmp_path/'z.zip', 'w') as z:
        for f in source.rglob('*.png'):
            z.write(f, Path('cifar10')/f.relative_to(source))  # with a folder around it
    (tmp_path/'zipped').mkdir()
    (tmp_path/'z.zip').rename(tmp_path/'zipped/cifar10.zip')
    a, b = (D.cifar10_dls(root, batch_size=4, cache=False) for root in (tmp_path, tmp_path/'zipped'))
    assert_same(inputs(a.train), inputs(b.train), 0)
    assert a.vocab[1] == 'b'


# Errors

def refuses(error, match, f, *args, **kwargs):
    with pytest.raises(error) as e: f(*args, **kwargs)
    for part in match if isinstance(match, tuple) else (match,): assert part in str(e.value), str(e.value)


def test_missing_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('REPQ_DATA', str(tmp_path/'env'))
    refuses(FileNotFoundError,
            (str(tmp_path/'env/cifar10.zip'), str(tmp_path/'data/cifar10'), 'REPQ_DATA', 'torchvision_dls'),
            D.cifar10_dls)
    refuses(FileNotFoundError, str(tmp_path/'arg/cifar10'), D.cifar10_dls, tmp_path/'arg')
    refuses(FileNotFoundError, (str(tmp_path/'x'), 'does not exist'), D.SRBenchmark, tmp_path/'x')
    refuses(FileNotFoundError, (str(tmp_path/'x'), 'does not exist'), D.image_folder_dls, tmp_path/'x')
    refuses(FileNotFoundError, (str(tmp_path/'env'), 'download=True'), D.torchvision_dls, 'FashionMNIST')
    (tmp_path/'data/cifar10').mkdir(parents=True)
    assert D.find_data('cifar10') == tmp_path/'data/cifar10'


def test_wrong_folder(tmp_path):
    source = folder(tmp_path/'set')
    refuses(ValueError, (str(source/'train'), 'one folder too high or too low'), D.image_folder_dls,
            source/'train')
    refuses(ValueError, (str(source), "found images in ['test']"),
            lambda: ((source/'train').rename(tmp_path/'away'), D.folder_tensors(source, False)))
    refuses(FileNotFoundError, (str(source), "holds ['test']"), D.SRBenchmark, source)
    (tmp_path/'empty/HR').mkdir(parents=True)
    refuses(FileNotFoundError, (str(tmp_path/'empty/HR'), 'holds no images'), D.SRBenchmark, tmp_path/'empty')


def test_grey(tmp_path):
    grey = save(noise(32, 32), folder(tmp_path/'set')/'train/a/99.png')
    refuses(ValueError, (str(grey), 'grey image (mode L)', "convert('RGB')"), D.folder_tensors,
            tmp_path/'set', False)
    # as every ImageNet loader
    D.image_folder_dls(tmp_path/'set', batch_size=17, size=16, num_workers=0).one_batch()
    grey = save(noise(32, 32), tmp_path/'sr/HR/1.png')
    refuses(ValueError, (str(grey), 'grey image'), D.SRBenchmark, tmp_path/'sr', cache=False)
    refuses(ValueError, 'expected colour', D.SRBenchmark, {'a': noise(1, 32, 32)})
    refuses(ValueError, 'three equal channels', D.rgb_to_y, noise(1, 32, 32))


def test_classes_differ(tmp_path):
    for load in (D.image_folder_dls, D.folder_tensors):
        refuses(ValueError, (str(tmp_path/'set'), "only in train ['b']", "only in test ['c', 'd']"), load,
                folder(tmp_path/'set', 'ab', 'acd'))


def test_sizes(tmp_path):
    odd = save(noise(3, 32, 30), folder(tmp_path/'set')/'test/b/99.png')
    refuses(ValueError, (str(odd), '32×30', 'image_folder_dls'), D.folder_tensors, tmp_path/'set', False)
    for i in (1, 2): save(noise(3, 40, 60), tmp_path/f'sr/HR/{i}.png')
    refuses(ValueError, (str(tmp_path/'sr'), '20×30 when small', 'choose patch=20'), D.sr_train_dls,
            tmp_path/'sr', patch=32, cache=False)
    small = [save(noise(3, 20, 30 + i), tmp_path/f'sr/LR_bicubic/X2/{i}x2.png') for i in (0, 1, 2)][1]
    refuses(ValueError, (str(small), '20×31, expected 20×30'), D.SRBenchmark, tmp_path/'sr', cache=False)
    refuses(ValueError, 'too small for scale 4', D.SRBenchmark, {'a': noise(3, 3, 9)}, 4)
    refuses(ValueError, 'cannot both train and validate', D.sr_train_dls, {'a': noise(3, 99, 99)})
    refuses(ValueError, 'batch_size=2000 for 1440 training images', D.digits_dls, 2000)
    refuses(ValueError, '9 images asked for, there are 8', D.evenly, 9, 8)


def test_broken_files(tmp_path, recwarn):
    bad = folder(tmp_path/'set')/'train/a/99.png'
    bad.write_bytes(b'not a picture')
    refuses(ValueError, (str(bad), 'replace or remove'), D.folder_tensors, tmp_path/'set', False)
    refuses(ValueError, (str(bad), 'replace or remove'),
            lambda: inputs(D.image_folder_dls(tmp_path/'set', 1, 16, num_workers=0).train))
    path = D.cache_path('x', 'k', tmp_path)
    path.write_bytes(b'junk')
    assert_same(D.cached(lambda: {'x': torch.ones(3)}, 'x', 'k', tmp_path)['x'], torch.ones(3), 0)
    assert any(str(path) in str(w.message) and 'damaged' in str(w.message) for w in recwarn)


def test_scores_refuse_the_wrong_range():
    a = torch.rand(1, 20, 20)
    refuses(ValueError, 'multiply by 255', D.psnr_y, a, a)
    refuses(ValueError, 'expected the same size', D.psnr_y, 255*a, 255*a[:, 1:])
    refuses(ValueError, '11×11', D.ssim_y, 255*a, 255*a, 5)
    assert D.psnr_y(255*a, 255*a) == math.inf
