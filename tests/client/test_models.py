"""What the models refuse, keep and ignore; their fields and defaults are pinned in contract/test_wire_models.py."""

import dataclasses

import pytest
from pydantic import ValidationError

from tbench2_env import StepResult, Tbench2Action, Tbench2Observation, Tbench2State


def test_an_action_refuses_unknown_fields() -> None:
    with pytest.raises(ValidationError, match="comand"):
        Tbench2Action.model_validate({"comand": "ls"})


def test_an_action_is_validated_on_assignment() -> None:
    action = Tbench2Action(command="ls")
    with pytest.raises(ValidationError):
        action.command = None  # type: ignore[assignment]


def test_an_action_type_is_not_restricted_by_the_client() -> None:
    assert Tbench2Action(action_type="levitate").action_type == "levitate"


def test_an_observation_ignores_what_a_newer_server_adds() -> None:
    observation = Tbench2Observation.model_validate({"output": "x", "novelty": 1})
    assert observation.output == "x"
    assert "novelty" not in observation.model_dump()


@pytest.mark.parametrize("reward", [None, True, 0, 1, 0.0, 0.25])
def test_a_reward_keeps_its_type(reward: bool | int | float | None) -> None:
    kept = Tbench2Observation(reward=reward).reward
    assert (type(kept), kept) == (type(reward), reward)


def test_metadata_is_not_shared_between_instances() -> None:
    Tbench2Action().metadata["k"] = 1
    assert Tbench2Action().metadata == {}


def test_a_state_keeps_further_fields_but_no_negative_count() -> None:
    assert Tbench2State.model_validate({"queue": 3}).model_dump()["queue"] == 3
    with pytest.raises(ValidationError):
        Tbench2State(step_count=-1)


def test_a_step_result_is_frozen_and_defaults_to_no_verdict() -> None:
    result = StepResult(Tbench2Observation())
    assert (result.reward, result.done) == (None, False)
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.reward = 1.0  # type: ignore[misc]
