"Every block of the zoo: exact, on fake GPUs, cheap to merge"
import statistics, time
import pytest, torch
from torch._subclasses.fake_tensor import FakeTensorMode
from repq.blocks import BLOCKS, make_block, orepa
from repq.tools.testing import assert_modes_agree, randomize_bn


@pytest.mark.parametrize('name', BLOCKS)
@pytest.mark.parametrize('i, o, stride, groups', [(8, 8, 1, 1), (8, 16, 2, 1), (8, 8, 1, 4), (4, 8, 2, 4)])
def test_branches_equal_merged(name, i, o, stride, groups):
    layer = make_block(name, i, o, stride=stride, groups=groups).double()
    randomize_bn(layer)
    for n, p in layer.named_parameters():
        if n.endswith(('scale', 'bias')) or not p.any(): torch.nn.init.normal_(p)
    for training in (True, False): assert_modes_agree(layer.train(training), torch.randn(3, i, 9, 7).double())


@pytest.mark.parametrize('size', [1, 5, (1, 3)])
@pytest.mark.parametrize('name', [n for n in BLOCKS if n != 'ecb'])
def test_other_kernel_sizes(name, size):
    layer = randomize_bn(make_block(name, 4, 4, size).double())
    assert_modes_agree(layer, torch.randn(3, 4, 7, 6).double())


@pytest.mark.parametrize('name', BLOCKS)
@pytest.mark.parametrize('mode', ['branches', 'merged'])
@pytest.mark.parametrize('training', [True, False])
def test_nothing_stays_on_the_cpu(name, mode, training):
    "Forward on fake CUDA tensors: a tensor left on the CPU raises"
    with FakeTensorMode(allow_non_fake_inputs=False):
        with torch.device('cuda'): layer = make_block(name, 8, 8).train(training)
        layer.mode = mode
        y = layer(torch.randn(2, 8, 6, 6, device='cuda'))
    assert y.shape == (2, 8, 6, 6) and y.device.type == 'cuda'


def test_fake_cuda_catches_a_cpu_tensor():
    with FakeTensorMode(), pytest.raises(Exception, match='(?i)device'):
        make_block('repvgg', 8, 8)(torch.randn(2, 8, 6, 6, device='cuda'))


@pytest.mark.slow('CPU times also move with what else the machine does')
def test_orepa_merge_costs_less_than_its_convolution():
    "256→256 on a 14×14 map, batch 16: CPU time, one thread, interleaved, allocator warm"
    layer, x = orepa(256, 256), torch.randn(16, 256, 14, 14)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    def cpu(f):
        start = time.process_time()
        f()
        return time.process_time() - start
    try:
        with torch.no_grad():
            weight = layer.kernel().weight
            def convolution(): return torch.conv2d(x, weight, padding=1)
            rounds = [(cpu(layer.kernel), cpu(convolution)) for _ in range(14)][3:]
    finally: torch.set_num_threads(threads)
    ratio = statistics.median(a/b for a, b in rounds)
    assert ratio < 1, f'merge/convolution {ratio:.2f}'
