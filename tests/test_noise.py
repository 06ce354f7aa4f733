"""The noise is a pure function with the right law: equal to a plain splitmix64, and random along every argument."""

import itertools
import math

import pytest
import torch
from counts import bound, chi_square
from waiting import NoSync

from labkit.errors import LabkitError
from labkit.noise import GOLDEN, Noise, Salt, _unit, splitmix64

CPU = torch.device("cpu")
WORD = (1 << 64) - 1


def noise(*seeds: int) -> Noise:
    return Noise.of(seeds, len(seeds), silent=False, device=CPU)


def places(*at: int, rows: int = 1) -> torch.Tensor:
    return torch.tensor([at] * rows)


# -- the function -------------------------------------------------------------------------------------------


def mix(state: int) -> int:
    """splitmix64's output from one state, in Python's unbounded integers."""
    z = (state + 0x9E3779B97F4A7C15) & WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
    return z ^ (z >> 31)


def unit(word: int) -> float:
    return ((word >> 12) + 0.5) * 2.0**-52


def place(seed: int, salt: int, at: int) -> int:
    return mix(mix(mix(seed & WORD) + salt) + at)


def test_splitmix64_known_answers():
    """The first five outputs from seed 1234567, as published with the reference implementation."""
    states = torch.tensor([(1234567 + k * GOLDEN + (1 << 63)) % (1 << 64) - (1 << 63) for k in range(5)])
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert [word & WORD for word in splitmix64(states).tolist()] == known
    assert [mix(s & WORD) for s in states.tolist()] == known


@pytest.mark.parametrize("seed", [0, 1, 7, -1, 2**63 - 1, 2**63, 2**64 - 1, 2**64 + 5])
def test_equals_plain_python(seed):
    at, vocab = [0, 1, 4095, 4096, 2**40], 5
    for salt in Salt:
        u = noise(seed).uniform(places(*at), salt)
        g = noise(seed).gumbel(places(*at), vocab, salt)
        assert u.dtype == torch.float64 and g.dtype == torch.float32
        assert u[0].tolist() == [unit(place(seed, salt, a)) for a in at]
        expected = [[-math.log(-math.log(unit(mix(place(seed, salt, a) + t)))) for t in range(vocab)] for a in at]
        torch.testing.assert_close(g[0], torch.tensor(expected, dtype=torch.float64).float(), rtol=1e-6, atol=1e-7)


def test_extreme_words_stay_inside():
    """The unit interval is open on both sides, so that no Gumbel value is infinite."""
    u = _unit(torch.tensor([0, -1, 2**63 - 1, -(2**63)]))
    assert u.tolist() == [2.0**-53, 1 - 2.0**-53, 0.5 - 2.0**-53, 0.5 + 2.0**-53]
    assert u.log().neg().log().neg().float().isfinite().all()


def test_depends_on_nothing_else():
    """Alone or in a batch, one row or many, a small vocabulary or a large one, first or last: the same bits."""
    seeds, at, vocab = (3, 99, -4, 2**50), (0, 17, 5, 1000000), 1031
    whole = noise(*seeds).gumbel(places(*at, rows=4), vocab, Salt.TARGET)
    flat = noise(*seeds).uniform(places(*at, rows=4), Salt.ACCEPT)
    for (b, seed), (r, a) in itertools.product(enumerate(seeds), enumerate(at)):
        one = noise(seed)
        for small in (1, 3, 8, 61, vocab):
            assert one.gumbel(places(a), small, Salt.TARGET)[0, 0].equal(whole[b, r, :small])
        assert one.uniform(places(a), Salt.ACCEPT)[0, 0] == flat[b, r]
    again = noise(*seeds[::-1]).gumbel(places(*at[::-1], rows=4), vocab, Salt.TARGET)
    assert again.equal(whole.flip(0, 1))
    ragged = torch.tensor([[5], [17]])
    assert noise(3, 3).gumbel(ragged, 61, Salt.TARGET).equal(whole[0, [2, 1], None, :61])


def test_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    noise(1, 2).gumbel(places(0, rows=2), 7, Salt.DRAFT)
    noise(1, 2).uniform(places(0, rows=2), Salt.DRAFT)
    assert torch.get_rng_state().equal(before)


def test_arguments_are_left_alone():
    at, seeds = places(3, 4), torch.tensor([5])
    Noise(seeds, False).gumbel(at, 7, Salt.DRAFT)
    Noise(seeds, False).uniform(at, Salt.DRAFT)
    assert at.tolist() == [[3, 4]] and seeds.tolist() == [5]


# -- seeds --------------------------------------------------------------------------------------------------


def test_seeds_of_rows():
    assert Noise.of(7, 3, silent=False, device=CPU).seeds.tolist() == [7, 8, 9]
    assert Noise.of([4, -1, 2**64 - 1], 3, silent=True, device=CPU).seeds.tolist() == [4, -1, -1]
    assert Noise.of((2**63,), 1, silent=False, device=CPU).seeds.tolist() == [-(2**63)]


@pytest.mark.parametrize("seed", [[1], [1, 2, 3], [1, 2.5], [1, None], "ab", 1.5, None])
def test_bad_seeds(seed):
    with pytest.raises(LabkitError, match=r"for 2 prompt\(s\); write one int, or a list of 2 int"):
        Noise.of(seed, 2, silent=False, device=CPU)


# -- the law ------------------------------------------------------------------------------------------------

SPAN = 512


def sheets(of: type[Noise] = Noise) -> dict[str, torch.Tensor]:
    """Uniform numbers `(512, 512)`; the named argument moves along a row of them, another one along a column."""
    line = torch.arange(SPAN)
    many, one = of(line, False), of(line[:1], False)
    rows = lambda at: at.expand(SPAN, -1)  # noqa: E731
    undo = lambda gumbel: torch.exp(-torch.exp(-gumbel.double()))  # noqa: E731
    tokens = one.gumbel(line[None], SPAN, Salt.TARGET)[0]
    return {
        "place": many.uniform(rows(line), Salt.ACCEPT),
        "round": many.uniform(rows(line * 4096), Salt.ACCEPT),
        "seed": many.uniform(rows(line), Salt.ACCEPT).T,
        "seed, by token": undo(many.gumbel(rows(line[:1]), SPAN, Salt.TARGET)[:, 0].T),
        "token": undo(tokens),
        "place, by token": undo(tokens.T),
        "salt": torch.stack([one.uniform(line[None], salt)[0] for salt in range(SPAN)], 1),
    }


def irregular(sheet: torch.Tensor) -> list[str]:
    """Which of the tests of independent uniform numbers a sheet fails."""
    cell = (sheet * 16).long().clamp(0, 15)
    failed = []
    if chi_square(cell.flatten().bincount(minlength=16), torch.full((16,), sheet.numel() / 16)) > bound(15):
        failed.append("uniform")
    for lag in (1, 2, 3, 8, 64):
        pairs = (cell[:, :-lag] * 16 + cell[:, lag:]).flatten().bincount(minlength=256)
        if chi_square(pairs, pairs.sum() / torch.full((256,), 256.0)) > bound(255):
            failed.append(f"lag {lag}")
    # rows and columns must not differ from each other: their means are normal, so the squares sum to a chi-square
    for name, dim in (("row means", 1), ("column means", 0)):
        if (((sheet.mean(dim) - 0.5) * (12 * SPAN) ** 0.5) ** 2).sum() > bound(SPAN):
            failed.append(name)
    return failed


def test_uniform_and_independent_along_every_argument():
    assert {name: irregular(sheet) for name, sheet in sheets().items() if irregular(sheet)} == {}


class Linear(Noise):
    """A hash that must not be used: linear in what goes in."""

    def uniform(self, at, salt):
        return _unit(self.seeds[:, None] * GOLDEN + torch.tensor(salt) * 0x2545F4914F6CDD1D + at * 0x5851F42D4C957F2D)


class Sum(Noise):
    """Another: one good finaliser over the sum of what goes in. Uniform, but its numbers come back elsewhere."""

    def uniform(self, at, salt):
        return _unit(splitmix64(self.seeds[:, None] + salt + at))


def repeats(of: type[Noise]) -> int:
    """How many of 2^18 numbers for different (seed, place, salt) occur before; 2^-17 expected of random words."""
    seeds, at = torch.arange(128), torch.cat([torch.arange(128), torch.arange(128) * 4096 + 4096]).expand(128, -1)
    numbers = torch.stack([of(seeds, False).uniform(at, salt) for salt in range(1, 9)])
    return numbers.numel() - numbers.unique().numel()


def test_no_number_comes_back():
    assert repeats(Noise) == 0


def test_bad_hashes_are_found():
    assert all(irregular(sheet) for name, sheet in sheets(Linear).items() if name in ("place", "round", "seed", "salt"))
    assert repeats(Sum) > 0


def test_gumbel_draws_the_softmax():
    """argmax(scores + noise) over many seeds, and over many places of one seed, has law softmax(scores)."""
    scores = torch.tensor([2.0, 0.0, -1.0, 1.0, -math.inf, 0.5, 2.0, -3.0])
    law = scores.double().softmax(-1)
    for name, g in {
        "seeds": Noise(torch.arange(200_000), False).gumbel(torch.full((200_000, 1), 9), 8, Salt.TARGET)[:, 0],
        "places": noise(5).gumbel(torch.arange(200_000)[None], 8, Salt.TARGET)[0],
    }.items():
        counts = (scores + g).argmax(-1).bincount(minlength=8)
        assert counts[4] == 0, name
        assert chi_square(counts[law > 0], 200_000 * law[law > 0]) < bound(6), name
        # the values themselves: a standard Gumbel has mean 0.5772 and variance pi^2 / 6
        assert abs(g.double().mean().item() - 0.57722) < 5 * math.pi / math.sqrt(6 * g.numel()), name


# -- on the device ------------------------------------------------------------------------------------------


def test_no_sync_and_no_default_device():
    whole = noise(3, 4)
    at = places(1, 2, rows=2)
    with NoSync(), torch.device("meta"):
        assert whole.gumbel(at, 11, Salt.TARGET).device == CPU
        assert whole.uniform(at, Salt.ACCEPT).device == CPU
    meta = Noise(whole.seeds.to("meta"), False)
    assert meta.gumbel(at.to("meta"), 11, Salt.TARGET).shape == (2, 2, 11)
    assert meta.uniform(at.to("meta"), Salt.ACCEPT).shape == (2, 2)


def _set(x, index, value):
    x[index] = value


@pytest.mark.parametrize(
    "sync",
    [
        lambda x: x[0].item(),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.to("cpu"),
        lambda x: x.to(device="cpu"),
        lambda x: x.numpy(),
        lambda x: x.nonzero(),
        lambda x: torch.nonzero(x),
        lambda x: torch.where(x > 0),
        lambda x: bool(x[0] > 0),
        lambda x: 1 if x[0] > 0 else 0,
        lambda x: int(x[0]),
        lambda x: float(x[0]),
        lambda x: [1, 2][x[0]],
        lambda x: x[x > 0],
        lambda x: x[0, x > 0],
        lambda x: _set(x, x > 0, 0),
        lambda x: x.masked_select(x > 0),
        lambda x: torch.masked_select(x, x > 0),
        lambda x: x.unique(),
        lambda x: 1 in x,
    ],
)
def test_the_sync_detector_detects(sync):
    with pytest.raises(AssertionError, match="in a round"), NoSync():
        sync(torch.tensor([1, 0, 1]))
