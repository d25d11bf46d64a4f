"Finished runs are copied from where they were trained to where they are kept"
import shutil
import pytest
import torch
import repq
from repq.reproduce import runs as R
from repq.reproduce.driver import run_batch
from repq.reproduce.publish import NETWORK, main, publish
from repq.reproduce.records import WEIGHTS, read_record
from repq.reproduce.training import load_network


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    "Of two seeds a run in full precision and a quantized one, cut off after two steps"
    root = tmp_path_factory.mktemp('trained')
    found = R.graph(R.cells('smoke', ['3'], 2))
    wanted = {('fp', 32), ('repq', 4)}
    chosen = R.limited([r for r in found if r.block == 'ecb' and (r.strategy, r.bits) in wanted], 2)
    batch = run_batch(chosen, root, workers=1, live=False)
    assert {o.state for o in batch.outcomes.values()} == {'done'}
    return root, chosen


@pytest.fixture
def profile(trained, monkeypatch):
    "The runs of the fixture as all runs of the profile"
    monkeypatch.setattr('repq.reproduce.publish.cells', lambda profile, seeds=None: profile)
    monkeypatch.setattr('repq.reproduce.publish.graph', lambda profile: trained[1])
    return trained


def kept(root):
    "Model, block, strategy and seed of the runs whose weights are kept"
    return {p.parent.name.rsplit('-', 1)[0].replace('-s', '') for p in root.glob(f'smoke/*/{WEIGHTS}')}


def test_published_runs_are_whole(profile, tmp_path):
    root, chosen = profile
    said = []
    assert publish(root, tmp_path, 'smoke', say=said.append) == [r.id for r in chosen] == said
    for r in chosen:
        assert read_record(tmp_path/'smoke'/r.id, weights=True) == read_record(root/'smoke'/r.id)
        assert (tmp_path/'smoke'/r.id/NETWORK).exists() == (r.seed == 0 and r.bits == 4)
    # everything that starts from seed 1 has ended, so its weights are a digest now
    assert kept(tmp_path) == {'ecbsr-ecb-fp0'}
    assert publish(root, tmp_path, 'smoke', say=said.append) == []   # nothing is left to do
    assert not list(tmp_path.glob('smoke/.publish-*'))


def test_weights_stay_while_a_run_needs_them(profile, tmp_path):
    root, chosen = profile
    source = tmp_path/'source'
    shutil.copytree(root, source)
    last = next(r for r in chosen if r.seed == 1 and r.bits == 4)
    shutil.move(source/'smoke'/last.id, tmp_path/last.id)
    publish(source, tmp_path/'kept', 'smoke', say=str)
    assert kept(tmp_path/'kept') == {'ecbsr-ecb-fp0', 'ecbsr-ecb-fp1'}
    shutil.move(tmp_path/last.id, source/'smoke'/last.id)
    publish(source, tmp_path/'kept', 'smoke', say=str)
    assert kept(tmp_path/'kept') == {'ecbsr-ecb-fp0'}


def test_the_merged_network_is_the_trained_one(profile, tmp_path):
    root, chosen = profile
    publish(root, tmp_path, 'smoke', say=str)
    run = next(r for r in chosen if r.seed == 0 and r.bits == 4)
    net, _ = load_network(root/'smoke'/run.id)
    x = 255*torch.rand(2, 1, 24, 24)
    loaded = repq.load(tmp_path/'smoke'/run.id/NETWORK)
    with torch.no_grad(): assert torch.equal(loaded(x), repq.merge(net)(x))


def test_a_damaged_run_is_named_and_left_out(profile, tmp_path):
    root, chosen = profile
    source = tmp_path/'source'
    shutil.copytree(root, source)
    notebook = source/'smoke'/chosen[-1].id/'notebook.ipynb'
    notebook.write_text(notebook.read_text() + ' ')
    said = []
    assert publish(source, tmp_path/'kept', 'smoke', say=said.append) == [r.id for r in chosen[:-1]]
    assert f'{chosen[-1].id} was left out' in said[-1] and 'notebook.ipynb is not the file' in said[-1]
    weights = source/'smoke'/chosen[0].id/WEIGHTS
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert chosen[0].id not in publish(source, tmp_path/'again', 'smoke', say=str)


def test_a_folder_without_results(tmp_path):
    with pytest.raises(SystemExit, match='there are no results of profile cpu in'):
        main([str(tmp_path), str(tmp_path/'kept')])
