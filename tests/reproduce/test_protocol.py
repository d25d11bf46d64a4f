"The protocol: its tests keep their level, and verdicts on records use what is valid and say what is not"
import shutil
from pathlib import Path
from statistics import fmean, stdev
import numpy as np
import pytest
from scipy import stats
from records import metrics_of, record_of, write_all, write_run
from repq.reproduce import report, statements, verdicts
from repq.reproduce.records import METHOD, id_of
from repq.reproduce.evidence import Results
from repq.reproduce.protocol import (EQUAL, FAILS, HOLDS, LEVEL, MARGINS, OPEN, Group, Interval, PValues,
                                     Question, decide, decide_family, decompose, holm, p_values, pool, power,
                                     seeds_needed, simulate)
from repq.reproduce.statements import accuracy, failure_table, list_claims, psnr
from repq.reproduce.verdicts import claim_power, clusters, pair_up, power_table, premises, run_spread

BETTER, NOT_BELOW, SAME = Question('>', margin=.5), Question('≥', margin=.5), Question('=', margin=.5)


# The tests themselves

@pytest.mark.parametrize('seeds', [2, 3, 5, (2, 3, 3, 3), (4, 5, 5, 5)])
@pytest.mark.parametrize('spreads', [(.3, .3, .3, .3), (.1, .2, .3, .4), (.8, .2, .2, .2)])
def test_no_more_errors_than_promised(spreads, seeds):
    "At most 6.5 % at the border of each claim; 20,000 batches, so that the luck of 1,000 does not decide"
    borders = (
        (BETTER, 0.0, HOLDS),
        (BETTER, 0.0, FAILS),
        (BETTER, 0.5, EQUAL),
        (SAME, 0.5, HOLDS),
        (SAME, -0.5, HOLDS),
        (NOT_BELOW, -0.5, HOLDS),
        (NOT_BELOW, -0.5, FAILS),
    )
    for question, truth, word in borders:
        found = decide(p_values(question, pool(simulate(spreads, seeds, truth, batches=20_000, random=5))))
        assert np.mean(found == word) <= .065, (question, word)
    if seeds == 3:
        for question, truth, word in borders:
            assert np.mean(decide(p_values(question, pool(simulate(spreads, seeds, truth)))) == word) <= .065


def test_one_variance_for_all_would_find_too_much():
    "Why not simply pool the variance: with one noisy network that lacks a seed it errs in more than a tenth"
    groups = simulate((4, 1, 1, 1), (2, 3, 3, 3), batches=20_000)
    free = sum(g.seeds - 1 for g in groups)
    common = sum(g.variance*(g.seeds - 1) for g in groups)/free
    naive = Interval(
        fmean([1, 1, 1, 1]) * sum(g.mean for g in groups) / 4,
        (common * sum(1 / g.seeds for g in groups)) ** 0.5 / 4,
        free,
    )
    assert np.mean(naive.p_above(0) <= LEVEL) > .1 > .065 > np.mean(pool(groups).p_above(0) <= LEVEL)


def test_against_scipy():
    rng = np.random.default_rng(0)
    x, y = rng.normal(.4, 1, 6), rng.normal(.1, 3, 6)
    def group(v): return Group(1, len(v), v.mean(), v.var(ddof=1))
    one = pool([group(x)])
    for alternative, p in (('greater', one.p_above(.2)), ('less', one.p_below(.2))):
        assert np.isclose(p, stats.ttest_1samp(x, .2, alternative=alternative).pvalue, rtol=1e-10)
    assert np.allclose(one.bounds(.9), stats.ttest_1samp(x, 0).confidence_interval(.9))
    welch, two = (
        stats.ttest_ind(x, y, equal_var=False, alternative='greater'),
        pool([group(x), group(-y)]),
    )  # half of x − y
    assert np.isclose(two.df, welch.df) and np.isclose(two.p_above(0), welch.pvalue)
    assert np.isclose(2*two.mid, x.mean() - y.mean())
    tost = max(
        stats.ttest_1samp(x, -0.5, alternative='greater').pvalue,
        stats.ttest_1samp(x, 0.5, alternative='less').pvalue,
    )
    assert np.isclose(p_values(SAME, one).holds, tost)


def test_weights_and_order_do_not_matter_twice():
    a, b = Group(1, 3, 1., .2), Group(2, 3, 4., .1)
    assert np.isclose(pool([a, b]).mid, 3) and pool([a, b]) == pool([b, a])
    doubled = pool([Group(2, 3, 1., .2), Group(4, 3, 4., .1)])
    assert np.allclose(
        (doubled.mid, doubled.error, doubled.df), (pool([a, b]).mid, pool([a, b]).error, pool([a, b]).df)
    )


def test_holm():
    assert np.allclose(holm([.01, .04, .03]), [.03, .06, .06]) and holm([]) == []
    assert holm([.9, .8]) == [1., 1.]
    p = PValues(.02, .98, 1.)
    assert decide(p) == HOLDS and decide_family([p]*3) == [OPEN]*3 and decide_family([p]) == [HOLDS]
    rng = np.random.default_rng(0)
    wrong = [
        any(
            w == HOLDS
            for w in decide_family([p_values(BETTER, Interval(m, 1.0, 8)) for m in rng.standard_t(8, 6)])
        )
        for _ in range(1000)
    ]
    assert np.mean(wrong) <= .065, 'the chance of one wrong verdict in a family of six'


def test_seeds_and_images_are_taken_apart():
    rng = np.random.default_rng(0)
    d = .1 + rng.normal(0, .03, (300, 1)) + rng.normal(0, .08, (1, 219)) + rng.normal(0, .02, (300, 219))
    assert np.allclose(decompose(d.tolist()), (.03, .08, .02), atol=.008)
    assert decompose([[1., 2.]]) is None and decompose([[1.], [2.]]) is None
    assert decompose([[1., 2.], [1., 2.]]).seed == 0


def test_power_and_seeds():
    exact = 1 - stats.nct.cdf(stats.t.ppf(.95, 4), 4, .9*5**.5)
    assert abs(power(BETTER, .9, (1.,), 5, batches=20_000) - exact) < .015
    n = seeds_needed(BETTER, .9, (1.,)*4)
    assert 2 <= n <= 5 < seeds_needed(BETTER, .9, (3.,)*4) and seeds_needed(BETTER, 1e-4, (30.,)) is None
    assert power(BETTER, .9, (1.,)*4, n) > .75


# The claims before the runs

def test_every_claim_says_what_would_make_it_fail():
    lines = failure_table().splitlines()[2:]
    assert [l.split('|')[1].strip() for l in lines] == [c.text for c in list_claims()]
    assert all(cell.strip() for l in lines for cell in l.strip('|').split('|'))
    for c in list_claims():
        for part in c.parts:
            assert part.question.margin > 0 or part.of == 'saving' or part.unit not in MARGINS


def test_power_of_claims_grows_with_seeds_and_falls_with_spread():
    listed = {c.text: c for c in list_claims()}
    c = listed['RepQ-BNEst beats Merged at 8 bits']
    chances = [claim_power(c, dict(points=s, dB=.02), n) for s, n in ((.3, 3), (.3, 10), (1., 3))]
    assert chances[1] > chances[0] > chances[2]
    assert (
        claim_power(listed['Training takes no longer than Table 4 says'], dict(points=0.3, dB=0.02), 3)
        is None
    )
    head, _, *rows = power_table(dict(points=.3, dB=.02)).splitlines()
    assert '3 seeds | 5 seeds | 10 seeds' in head and len(rows) > 30


# Records

@pytest.fixture(scope='module')
def seeds3(tmp_path_factory): return write_all(tmp_path_factory.mktemp('seeds'), seeds=3)


@pytest.fixture
def batch(seeds3, tmp_path): return Path(shutil.copytree(seeds3, tmp_path/'results'))


def run_at(address, seed=0, seeds=3):
    return next(r for r in Results('smoke', '/nowhere', seeds).cells[address].runs if r.seed == seed)


def verdict(root, text, seeds=3):
    results = Results('smoke', root, seeds)
    return verdicts.judge_claim(next(c for c in list_claims() if c.text == text), results)


def change(root, address, seed, record=None, **metrics):
    run = run_at(address, seed)
    return write_run(root, run, {**metrics_of(run), **metrics}, **(record or {}))


def set_all(root, bits, **levels):
    "Accuracies of methods on all networks, scattered by 0.1 points over seeds"
    for (table, row, column), cell in Results('smoke', root, 3).cells.items():
        level = levels.get(
            row[-1].replace('-', '_'), levels.get('RepQ') if row[-1].startswith('RepQ') else None
        )
        if table != '2' or column != bits or level is None: continue
        for r in cell.runs:
            change(
                root,
                (table, row, column),
                r.seed,
                best_accuracy=level + 0.001 * ((r.seed + len(row[1])) % 3 - 1),
            )


MERGED4 = 'RepQ-BN beats Merged at 4 bits'


@pytest.mark.parametrize('gain, expected', [(.01, HOLDS), (-.01, FAILS), (0., EQUAL)])
def test_verdict_follows_the_numbers(batch, gain, expected):
    set_all(batch, '4', Merged=.90, RepQ=.90 + gain)
    v = verdict(batch, MERGED4)
    assert v.verdict == expected and v.paper == 'holds' and v.evidence[0].ours.how == '4 networks and 3 seeds'
    low, high = v.evidence[0].ours.bounds()
    assert low < 100*gain + .1 and high > 100*gain - .1
    assert {HOLDS: low > 0, FAILS: high < 0, EQUAL: -.5 < low < 0 < high < .5}[expected]
    assert ('worse than Merged' if gain < 0 else 'Merged') in v.why and 'the paper has 1.23' in v.why
    assert '4 networks and 3 seeds' in v.why
    assert all(s.links and all((batch/'smoke'/l).exists() for l in s.links) for s in v.evidence[0].singles)


def test_the_pooled_difference_is_computed_from_the_records(seeds3):
    v = verdict(seeds3, MERGED4)
    d = {}
    for model, method in statements.networks('RepQ-BN').items():
        d[model] = [
            100
            * (
                metrics_of(run_at(accuracy(model, method, '4'), s))['best_accuracy']
                - metrics_of(run_at(accuracy(model, 'Merged', '4'), s))['best_accuracy']
            )
            for s in range(3)
        ]
    ours = v.evidence[0].ours
    parts = [stdev(x)**2/3/16 for x in d.values()]
    assert np.isclose(ours.mid, fmean(fmean(x) for x in d.values()))
    assert np.isclose(ours.error, sum(parts)**.5)
    assert np.isclose(ours.df, 2*sum(parts)**2/sum(p*p for p in parts))
    single = v.evidence[0].singles[0]
    assert single.pair.name == 'RepVGG-A0'
    assert np.allclose(single.ours.bounds(.9), stats.ttest_1samp(d['RepVGG-A0'], 0).confidence_interval(.9))


def test_networks_that_share_runs_are_one_group():
    "Both ResNets are compared with the same plain one, so their differences are not independent"
    results = Results('smoke', '/nowhere', 3)
    def groups(text):
        part = next(c for c in list_claims() if c.text == text).parts[0]
        return sorted([p.pair.name for p in g] for g in clusters([pair_up(p, results) for p in part.pairs]))
    cells = results.cells
    plain = [cells[accuracy(m, 'Plain', '8')].runs[0].parent for m in ('AC-ResNet-18', 'OREPA-ResNet-18')]
    together = (
        [['AC-ResNet-18', 'OREPA-ResNet-18']]
        if plain[0] == plain[1]
        else [['AC-ResNet-18'], ['OREPA-ResNet-18']]
    )
    assert groups('RepQ-BN beats Plain at 8 bits') == sorted(together + [['RepVGG-A0'], ['RepVGG-B0']])
    assert len(groups(MERGED4)) == 4 and len(groups('RepQ beats Plain on ECBSR at 8 bits')) == 1
    assert len(groups('On RepVGG-B0 Merged is close to RepQ at 8 bits')) == 1


def test_one_seed_decides_nothing(tmp_path):
    v = verdict(write_all(tmp_path, seeds=1), MERGED4, seeds=1)
    assert v.verdict == OPEN and 'one seed decides nothing' in v.why and v.weakest is None


def test_equal_scores_are_not_certain(batch):
    "The same difference in all seeds: the spread is at least one validation image"
    for s in range(3):
        for method, a in (('Merged', .9), ('RepQ-BN', .91)):
            change(batch, accuracy('RepVGG-A0', method, '4'), s, best_accuracy=a, test_size=360)
    single = verdict(batch, MERGED4).evidence[0].singles[0]
    assert np.isclose(single.ours.error, 100/360/3**.5) and np.isclose(single.ours.mid, 1)


# Bad input: used as far as it is valid, and said

def test_a_seed_missing_in_one_arm(batch):
    shutil.rmtree(batch/'smoke'/run_at(accuracy('RepVGG-A0', 'Merged', '4'), 1).id)
    v = verdict(batch, MERGED4)
    assert 'RepVGG-A0 Merged at 4 bits was not run (seed 1)' in v.notes
    assert v.evidence[0].ours.how == '4 networks and 2 to 3 seeds'
    assert v.evidence[0].singles[0].ours.how == '2 seeds' and v.evidence[0].singles[0].ours.df == 1
    assert v.verdict == HOLDS


def test_records_of_two_processors(batch):
    chip = dict(name='another processor', instructions='ba9876543210')
    segment = record_of(run_at(accuracy('RepVGG-A0', 'Merged', '4')), {})['segments'][0]
    other = dict(processor=chip, segments=[segment | dict(processor=chip)])
    change(batch, accuracy('RepVGG-A0', 'Merged', '4'), 1, other)
    v = verdict(batch, MERGED4)
    note = ('RepVGG-A0: no pair of two processors '
            '(a processor, 0123456789ab; another processor, ba9876543210) (seed 1)')
    assert any(n.startswith(note) for n in v.notes)
    assert v.evidence[0].singles[0].ours.how == '2 seeds'
    change(
        batch, accuracy('RepVGG-A0', 'RepQ-BN', '4'), 1, other
    )  # both arms there: a pair again, and it is said that there are two processors
    v = verdict(batch, MERGED4)
    assert v.evidence[0].singles[0].ours.how == '3 seeds'
    assert any('pairs from 2 processors, each pair from one' in n for n in v.notes)


def test_records_of_two_methods(batch):
    "A record of another METHOD has another name, and makes no pair"
    assert verdict(batch, MERGED4).evidence[0].singles[0].ours.how == '3 seeds'
    run = run_at(accuracy('RepVGG-A0', 'Merged', '4'), 1)
    old = id_of(run.stored, METHOD + 1)
    write_run(batch, run, id=old, method=METHOD + 1).rename(batch/'smoke'/old)
    v = verdict(batch, MERGED4)
    assert any(f'METHOD {METHOD + 1}, now {METHOD}' in n for n in v.notes)
    assert v.evidence[0].singles[0].ours.how == '2 seeds'


@pytest.mark.parametrize('method, expected', [('RepQ-BN', OPEN), ('Merged', HOLDS)])
def test_a_run_that_collapsed(batch, method, expected):
    "Left out in both arms; a verdict in favour of the arm that it belongs to is not given"
    assert verdict(batch, MERGED4).verdict == HOLDS
    change(batch, accuracy('RepVGG-A0', method, '4'), 1, accuracy=.1, best_accuracy=.1)
    v = verdict(batch, MERGED4)
    assert (
        f'RepVGG-A0 {method} at 4 bits is collapsed: accuracy 0.1000 at its end, chance is 0.1000 (seed 1)'
        in v.notes
    )
    assert v.verdict == expected and v.evidence[0].singles[0].ours.how == '2 seeds'
    assert any('the arm that it favours went wrong' in n for n in v.notes) == (expected == OPEN)


@pytest.mark.parametrize('below, collapsed', [(.9, False), (1.1, True)])
def test_super_resolution_below_bicubic_is_a_collapse(batch, below, collapsed):
    "Up to 1 dB below bicubic interpolation is a weak result, more is none"
    address = psnr('4', 'RepQ', 'Set5')
    run = run_at(address, 2)
    m = metrics_of(run)
    write_run(batch, run, m | dict(bicubic={s: v + below for s, v in m['psnr'].items()}))
    v = verdict(batch, 'RepQ beats Plain on ECBSR at 4 bits')
    assert v.evidence[0].ours.how == f'20 images and {2 if collapsed else 3} seeds'
    assert (v.verdict == OPEN) == collapsed == any('collapsed' in n for n in v.notes)


# Super-resolution

def test_images_are_pooled_and_seeds_are_the_sample(batch):
    v = verdict(batch, 'RepQ beats Merged on ECBSR at 4 bits')
    def means(method):
        return [
            fmean(
                x
                for s in metrics_of(run_at(psnr('4', method, 'Set5'), k))['per_image'].values()
                for x in s.values()
            )
            for k in range(3)
        ]
    d = [a - b for a, b in zip(means('RepQ'), means('Merged'))]
    a = v.evidence[0]
    assert a.ours.how == '20 images and 3 seeds' and np.isclose(a.ours.df, 2)
    assert np.isclose(a.ours.mid, fmean(d))
    assert np.allclose(a.ours.bounds(.9), stats.ttest_1samp(d, 0).confidence_interval(.9))
    assert [s.pair.name for s in a.singles] == list(statements.SETS) and 0 <= a.scatter.image
    assert any('between seeds' in n for n in v.notes)


# The premise

def test_a_claim_outside_its_premise(batch):
    assert premises(Results('smoke', batch, 3))['RepVGG-A0', 'RepQ-BN'].verdict in (HOLDS, OPEN, EQUAL, FAILS)
    set_all(batch, '32', Plain=.90, RepQ=.92)
    assert not verdict(batch, MERGED4).outside
    assert verdict(batch, 'Re-parametrized training beats plain training in full precision').verdict == HOLDS
    for s in range(3): change(batch, accuracy('RepVGG-A0', 'RepQ-BN', '32'), s, best_accuracy=.88 + .0005*s)
    v = verdict(batch, MERGED4)
    assert v.outside and v.notes[0].startswith('judged outside its premise')
    assert 'RepVGG-A0 (RepQ-BN) −1.95' in v.notes[0] and 'RepVGG-B0' not in v.notes[0] and v.verdict == HOLDS
    assert not verdict(batch, 'RepQ-BN exceeds QARepVGG (QAT) by more than 1 % at 8 bits').outside
    assert not verdict(batch, 'Re-parametrized training beats plain training in full precision').outside
    assert 'outside its premise' in report.claims_html([v])
    assert 'judged outside its premise' in report.claims_markdown([v])


def test_a_single_network_that_says_otherwise_is_named(batch):
    set_all(batch, '4', Merged=.90, RepQ=.93)
    for s in range(3): change(batch, accuracy('OREPA-ResNet-18', 'RepQ', '4'), s, best_accuracy=.87 + .0002*s)
    v = verdict(batch, MERGED4)
    assert v.verdict == HOLDS
    assert any(n.startswith('single results show the opposite: OREPA-ResNet-18 (−') for n in v.notes)
    whole = verdict(batch, 'RepQ outperforms the baselines in all experiments')
    assert whole.verdict == FAILS and 'worse than Merged on OREPA-ResNet-18' in whole.why


# Times, counts, the paper itself

def test_time_saved(batch):
    run = run_at(('4', ('ACNets',), 'QAT RepQ-BN'))
    def put(est, width):
        times = {
            **dict.fromkeys(('FP Plain', 'QAT Plain'), 1.0),
            'FP Re-parametrized': 2.0,
            'QAT RepQ-BN': 2.0,
            'QAT RepQ-BNEst': est,
        }
        span = {c: dict(median=v, low=v*(1 - width), high=v*(1 + width)) for c, v in times.items()}
        write_run(batch, run, metrics_of(run) | dict(relative=span, seconds=span))
    claim = 'RepQ-BNEst takes 25 % less training time than RepQ-BN'
    for est, width, expected in ((1.4, .01, HOLDS), (1.7, .01, FAILS), (1.5, .2, OPEN)):
        put(est, width)
        v = verdict(batch, claim)
        assert v.verdict == expected and np.isclose(v.weakest.ours.mid, 100*(1 - est/2))
        assert f'{100*(1 - est/2):.0f} ±' in v.why
    put(1.9, .001)
    assert verdict(batch, 'RepQ-BNEst takes less training time than RepQ-BN').verdict == HOLDS
    assert verdict(batch, 'Training takes no longer than Table 4 says').verdict == FAILS


def test_bit_operations_are_counted_on_the_papers_networks(batch):
    "A narrow network in the records does not change them"
    claim = '4-bit RepVGG-B0 needs two times fewer bit-operations than 8-bit RepVGG-A0'
    write_run(
        batch,
        run_at(accuracy('RepVGG-B0', 'RepQ-BNEst', '4')),
        cost=dict(macs=1, bit_ops=32_000_000, parameters=1),
    )
    v = verdict(batch, claim)
    assert v.verdict == FAILS and abs(v.weakest.ours.mid - 1.7685) < 1e-3 and v.paper == 'contradicts itself'
    assert '1.77' in v.paper_why


def test_where_the_paper_disagrees_with_itself():
    odd = {c.text: statements.judge_paper_claim(c)[0] for c in list_claims()}
    assert {t: w for t, w in odd.items() if w in ('ties', 'contradicts itself')} == {
        'RepQ-BN beats Plain at 4 bits': 'ties',
        'RepQ beats Plain on ECBSR at 4 bits': 'ties',
        'RepQ beats Merged on ECBSR at 4 bits': 'ties',
        'RepQ outperforms the baselines in all experiments': 'ties',
        'RepQ-BN exceeds QARepVGG (PTQ) by more than 1 % at 8 bits': 'ties',
        'RepQ-BN exceeds QARepVGG (QAT) by more than 1 % at 8 bits': 'ties',
        'On RepVGG-B0 Merged is close to RepQ at 4 bits': 'contradicts itself',
        'Merged is inferior to Plain on ECBSR at 8 bits': 'contradicts itself',
        'Merged is inferior to Plain on ECBSR at 4 bits': 'contradicts itself',
        '8-bit RepQ of ECBSR is lossless': 'contradicts itself',
        '4 bits need four times fewer bit-operations than 8': 'contradicts itself',
        '4-bit RepVGG-B0 needs two times fewer bit-operations than 8-bit RepVGG-A0': 'contradicts itself',
        'RepQ-BNEst takes 25 % less training time than RepQ-BN': 'contradicts itself',
        'Merged 8-bit RepVGG-A0 gains from a tenfold smaller learning rate': 'contradicts itself',
    }


def test_every_verdict_is_a_sentence(seeds3):
    found = verdicts.claims('smoke', seeds3, 3)
    assert len({v.claim for v in found}) == len(list_claims())
    for v in found:
        assert v.why and 'None' not in v.why and 'nan' not in v.why and not v.why.endswith('.')
        if v.weakest is not None and v.weakest.compare.unit in MARGINS:
            assert '±' in v.why and 'seeds' in v.why
    assert verdict(seeds3, '4-bit OREPA-ResNet-18 gains from half the weight decay').why.endswith(
        'no run in the smoke profile'
    )
    spread = run_spread(Results('smoke', seeds3, 3))
    assert 0 < spread['points'] < .2 and 0 < spread['dB'] and power_table(spread)
