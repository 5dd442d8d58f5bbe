"""A token is in no error: not where the server repeats it, not in part, not in the error that an error came of."""

import traceback

import pytest

from timm_knapsack.errors import DataError, HubError, KnapsackError
from timm_knapsack.hub import publication

TOKEN = "hf_" + "abcdefgh" * 4


class Answer(Exception):
    """What the Hub client raises of an answer."""

    def __init__(self, text: str, status: int = 400):
        super().__init__(text)
        self.response = type("Response", (), {"status_code": status, "headers": {}})


def said(monkeypatch, error: Exception) -> str:
    """All that a user sees when the client raises this, the errors that it came of included."""

    def fails(*args, **kwargs):
        raise error

    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", fails)
    with pytest.raises(HubError) as caught:
        publication.publish("org/net", {}, {}, token=TOKEN)
    return "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("before", range(260, 310, 7))
def test_a_server_that_repeats_it_where_the_message_is_cut(monkeypatch, before):
    text = said(monkeypatch, Answer("x" * before + TOKEN))
    assert not any(TOKEN[:n] in text for n in range(6, len(TOKEN) + 1)) and "answered 400" in text


@pytest.mark.parametrize("link", ["__cause__", "__context__"])
def test_an_error_that_came_of_one_that_has_it(monkeypatch, link):
    error = Answer("no connection")
    setattr(error, link, ValueError(f"Illegal header value b'Bearer {TOKEN}'"))
    assert TOKEN not in said(monkeypatch, error)


def test_a_cause_that_tells_nothing_is_kept(monkeypatch):
    assert "Answer: the disk is full" in said(monkeypatch, Answer("the disk is full"))


@pytest.mark.parametrize("token", ["hf_abc\x01def", "hf_abc def", "hf_abcé"])
def test_one_of_the_environment_is_looked_at_too(monkeypatch, token):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: token)
    with pytest.raises(HubError, match=r"^this is no Hub token: it is empty, or has characters that none has; run `hf"):
        publication.publish("org/net", {}, {})


def test_whatever_error_repeats_one():
    for kind in (KnapsackError, HubError, DataError):
        assert str(kind(f"the server said 'Bearer {TOKEN}' to /data/hf_datasets/x")) == (
            "the server said 'Bearer hf_…' to /data/hf_datasets/x"
        )
