"Errors at construction say what was given, what is possible and what to do"
import pytest, torch
from torch import nn
from repq import Conv, Fixed, Identity, Kernel, Norm, RepConv2d, Scale, Seq, Sum, WeightNorm
from repq.blocks import ecb, make_block, orepa, repvgg
from repq.algebra.kernel import sobel_x

CASES = {
    'output channels differ': (lambda: Sum(Conv(4, 8, 3), Conv(4, 1, 3)), 'equal channels, got 4→8, 4→1'),
    'input channels differ': (lambda: Sum(Conv(4, 8, 3), Conv(2, 8, 3)), '4→8, 2→8'),
    'identity changes channels': (lambda: Sum(Conv(4, 8, 3), Identity(4)), '4→8, 4→4'),
    'identity with stride': (lambda: RepConv2d(Sum(Conv(4, 4, 3), Norm(Identity(4))), stride=2),
                             'identity cannot have stride'),
    'mixed groups': (lambda: Sum(Conv(12, 12, 3, groups=4), Conv(12, 12, 3, groups=6)),
                     'must divide all the others'),
    'mixed groups in a sequence': (lambda: Seq(Conv(12, 12, 3, groups=4), Conv(12, 12, 3, groups=6)),
                                   'groups [4, 6]'),
    'groups do not divide': (lambda: Conv(6, 8, 3, groups=4), 'groups=4 must divide the channels, got 6→8'),
    'groups zero': (lambda: Conv(4, 8, 3, groups=0), 'groups must be a whole number of at least 1, got 0'),
    'no channels': (lambda: Conv(0, 8, 3), 'in_channels must be'),
    'no middle channels': (lambda: orepa(4, 4, expansion=0), 'out_channels must be'),
    'identity of no channels': (lambda: Identity(0), 'channels must be'),
    'identity to other channels': (lambda: Identity(4, 8), 'cannot change 4 channels to 8'),
    'strided identity': (lambda: Identity(4, stride=2), 'give it to the layer'),
    'even in odd': (lambda: Sum(Conv(4, 4, 3), Conv(4, 4, 2)), 'make both odd or both even'),
    'even block': (lambda: repvgg(4, 4, kernel_size=2), 'a 1×1 branch cannot be centred in 2×2'),
    'kernel size': (lambda: Conv(4, 4, (3, 0)), 'kernel_size must be a positive whole number'),
    'kernel size of three numbers': (lambda: Conv(4, 4, (3, 3, 3)), 'or two of them'),
    'stride in a branch': (lambda: Seq(Conv(4, 4, 1, stride=2), Conv(4, 4, 3)), 'give it to the layer'),
    'padding in a branch': (lambda: Conv(4, 4, 3, padding=1), 'the layer pads once'),
    'dilation in a branch': (lambda: Conv(4, 4, 3, dilation=2), 'dilation=2'),
    'kernel size of a float': (lambda: Conv(4, 4, 3.), 'got 3.0'),
    'dilation of the layer': (lambda: RepConv2d(Conv(4, 4, 3), dilation=2), 'dilation=2'),
    'reflect padding in a branch': (lambda: Conv(4, 4, 3, padding_mode='reflect'), 'nn.ReflectionPad2d'),
    'after is no norm': (lambda: RepConv2d(Conv(4, 4, 3), after=nn.ReLU()),
                         'after must be True, None or an nn.BatchNorm2d'),
    'unknown statistics': (lambda: RepConv2d(Conv(4, 4, 3), statistics='exact'), "'estimate'"),
    'unknown statistics of a norm': (lambda: Norm(Conv(4, 4, 3), statistics='exact'), "'estimate'"),
    'mode without quantizers': (lambda: setattr(repvgg(4, 4), 'mode', 'quantized'), 'repq.quantize'),
    'groups of a kernel': (lambda: Kernel(torch.ones(4, 4, 3, 3), groups=0), '0 groups'),
    'reflect padding': (lambda: RepConv2d(Conv(4, 4, 3), padding_mode='reflect'), 'nn.ReflectionPad2d'),
    'negative padding': (lambda: RepConv2d(Conv(4, 4, 3), padding=-1), 'padding must be'),
    'stride zero': (lambda: RepConv2d(Conv(4, 4, 3), stride=0), 'stride must be'),
    'norm after of other channels': (lambda: RepConv2d(Conv(4, 8, 3), after=nn.BatchNorm2d(4)),
                                     'the branch gives 8'),
    'channels in a sequence': (lambda: Seq(Conv(4, 8, 1), Conv(4, 4, 3)),
                               'gives 8 channels and Conv(4, 4, 3) takes 4'),
    'weight norm with bias': (lambda: WeightNorm(Conv(4, 4, 3, bias=True)), 'Conv without bias'),
    'weight norm of a norm': (lambda: WeightNorm(Norm(Conv(4, 4, 3))), 'Conv without bias'),
    'unknown block': (lambda: make_block('repvg', 4, 4), "'repvgg'"),
    'ecb of another size': (lambda: ecb(4, 4, 5), 'kernel_size must be 3'),
    'unknown mode': (lambda: setattr(repvgg(4, 4), 'mode', 'fast'), "'branches', 'merged'"),
    'bias of a kernel': (lambda: Kernel(torch.ones(4, 4, 3, 3), torch.ones(1)), 'for 4 output channels'),
    'empty sum': (lambda: Sum(), 'at least one'),
    'empty sequence': (lambda: Seq(), 'at least one'),
    'fixed weight of the wrong rank': (lambda: Fixed(Kernel(torch.ones(4, 3, 3))), '4 dimensions'),
}


@pytest.mark.parametrize('case', CASES)
def test_says_what_to_do(case):
    make, message = CASES[case]
    with pytest.raises(ValueError) as error: make()
    assert message in str(error.value)


@pytest.mark.parametrize('make', [
    lambda: Sum(nn.Conv2d(4, 4, 3)), lambda: Seq(nn.ReLU()), lambda: Norm(nn.Conv2d(4, 4, 3)),
    lambda: Scale(sobel_x(4)), lambda: RepConv2d(nn.Conv2d(4, 4, 3))])
def test_not_a_branch(make):
    with pytest.raises(TypeError, match='is made of branches'): make()


def test_unknown_argument():
    with pytest.raises(TypeError, match='no argument .strides.'): Conv(4, 4, 3, strides=2)


def test_input_shape():
    message = r'expected an input of shape \(batch, 4, height, width\), got \(2, 3, 5, 5\)'
    with pytest.raises(ValueError, match=message):
        repvgg(4, 4)(torch.randn(2, 3, 5, 5))


@pytest.mark.parametrize('mode', ['branches', 'merged'])
@pytest.mark.parametrize('make', [
    lambda: repvgg(4, 8, stride=2), lambda: RepConv2d(Seq(Norm(Conv(4, 8, 1)), Conv(8, 8, 3)))])
def test_batch_of_one_value(mode, make):
    layer = make()
    layer.mode = mode
    with pytest.raises(ValueError, match='(?i)more than (one|1) value per channel'):
        layer(torch.randn(1, 4, 1, 1))
    assert layer.eval()(torch.randn(1, 4, 1, 1)).shape == (1, 8, 1, 1)
