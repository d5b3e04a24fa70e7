"""Every attack yields 0.0 or no verdict and learns nothing, and an honest solution still scores 1.0 beside it.

`TB2_TEST_RUNGS=1,2,4 pytest tests/attacks` attacks on these rungs of the isolation ladder; else on the best one here.
With TB2_TAMPER=report what an attack changed is in `info.tampered`; with drop there is no verdict, with restore 0.0.
"""

from collections.abc import Iterator

import pytest

from .conftest import ATTACKS, SETTINGS, Campaign, Setting
from .frame import Attack, Outcome, Tamper, Verdicts


def cases() -> Iterator[object]:
    for setting in SETTINGS:
        for name, attack in ATTACKS.items():
            if setting.includes(attack):
                yield pytest.param(setting, name, id=f"{setting}-{name}")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("setting", "name"), list(cases()))
def test_attack(campaign: Campaign, setting: Setting, name: str) -> None:
    attack, outcome = ATTACKS[name], campaign(setting)[name]
    if outcome.failure or not outcome.ran or outcome.leaked or outcome.honest_reward != 1.0:
        pytest.fail(f"{outcome}")
    if attack.tampers:
        assert_tampering_is_dealt_with(attack, setting.tamper, outcome)
    else:
        assert_verdict(outcome, attack.expects)


def assert_tampering_is_dealt_with(attack: Attack, tamper: Tamper, outcome: Outcome) -> None:
    match tamper:
        case Tamper.REPORT:
            assert attack.tampers in [entry["path"] for entry in outcome.info.get("tampered", [])], outcome
            assert outcome.reward != 1.0, outcome
        case Tamper.DROP:
            assert (outcome.reward, outcome.no_verdict) == (None, "tampered"), outcome
        case Tamper.RESTORE:
            assert_verdict(outcome, attack.restored)


def assert_verdict(outcome: Outcome, expected: Verdicts) -> None:
    wanted: dict[Verdicts, tuple[float | None, ...]] = {
        Verdicts.ZERO: (0.0,), Verdicts.NONE: (None,), Verdicts.ZERO_OR_NONE: (0.0, None),
    }  # fmt: skip
    assert outcome.reward in wanted[expected], outcome
    if outcome.reward is None:
        assert outcome.no_verdict, "no verdict, and no reason"
        assert outcome.error
