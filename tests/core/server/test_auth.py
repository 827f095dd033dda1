"""Keys: every route but one needs them, whatever is asked and however it is written."""

import base64

import pytest
from deepinfer.errors import ConfigError
from deepinfer.server import auth

KEY = "sk-secret-0123"
ALL = [
    ("GET", "/"),
    ("GET", "/page.js"),
    ("GET", "/page.css"),
    ("GET", "/ready"),
    ("GET", "/metrics"),
    ("GET", "/version"),
    ("GET", "/v1/models"),
    ("GET", "/openapi.json"),
    ("GET", "/nowhere"),
    ("GET", "/health/"),
    ("GET", "//health"),
    ("POST", "/v1/generate"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("GET", "/v1/recipes"),
    ("POST", "/v1/recipes"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/abort_requests"),
]


@pytest.fixture(scope="module")
def locked():
    return {"api_keys": ("sk-other-4567", KEY)}


def test_every_route_but_health_is_locked(toy_server, locked):
    server = toy_server(**locked)
    for method, path in ALL:
        answer = server.ask(method, path, {} if method == "POST" else None)
        assert answer.status == 401, path
        assert answer.error["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"].startswith("Basic")
    assert server.get("/health").status == 200


def test_no_route_was_forgotten(toy_server, locked):
    document = toy_server().get("/openapi.json").json["paths"]
    assert set(document) - {"/health"} <= {path for _, path in ALL}


def basic(key):
    return {"authorization": "Basic " + base64.b64encode(f"any:{key}".encode()).decode()}


@pytest.mark.parametrize(
    "headers, status",
    [
        ({"authorization": f"Bearer {KEY}"}, 200),
        ({"authorization": f"bearer {KEY}"}, 200),
        ({"x-api-key": KEY}, 200),
        (basic(KEY), 200),
        ({"authorization": f"Bearer {KEY}x"}, 401),
        ({"authorization": f"Bearer {KEY[:-1]}"}, 401),
        ({"authorization": "Bearer "}, 401),
        ({"authorization": KEY}, 401),
        ({"authorization": "Basic !!!"}, 401),
        ({"authorization": "Basic /w=="}, 401),
        (basic(""), 401),
        ({"x-api-key": ""}, 401),
        # Two that disagree: the first one counts, so a wrong one cannot hide behind a right one.
        ({"authorization": "Bearer wrong-key", "x-api-key": KEY}, 401),
    ],
)
def test_how_a_key_is_sent(toy_server, locked, headers, status):
    assert toy_server(**locked).get("/version", headers).status == status


def test_files_of_keys(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# mine\nsk-first-123\n\n  sk-second-456  \nsk-first-123\n")
    assert auth.read_keys(str(path)) == ("sk-first-123", "sk-second-456")
    assert auth.keys_of("sk-first-123, sk-second-456") == (
        "sk-first-123",
        "sk-second-456",
    )


@pytest.mark.parametrize("text", ["", "# nothing\n", "short\n", "has space in it\n", "ключ-ключ\n"])
def test_files_without_a_usable_key_are_refused(tmp_path, text):
    path = tmp_path / "keys"
    path.write_text(text, "utf-8")
    with pytest.raises(ConfigError, match="api_key_file") as why:
        auth.read_keys(str(path))
    assert not text.strip() or text.strip() not in str(why.value)
    with pytest.raises(ConfigError, match="api_key_env"):
        auth.keys_of(text.strip())


def test_a_missing_file_or_variable_does_not_open_the_server(tmp_path):
    with pytest.raises(ConfigError):
        auth.read_keys(str(tmp_path / "none"))
    with pytest.raises(ConfigError):
        auth.keys_of("")


def test_all_keys_are_looked_at(monkeypatch):
    """Whichever is right, as many comparisons are made: time tells nothing."""
    seen = []
    compare = auth.hmac.compare_digest
    monkeypatch.setattr(auth.hmac, "compare_digest", lambda a, b: seen.append(1) or compare(a, b))
    keys = auth.Keys(["sk-first-123", "sk-second-456", "sk-third-789"])
    for given, want in [
        ("sk-first-123", "key1"),
        ("sk-third-789", "key3"),
        ("no", None),
        (None, None),
    ]:
        seen.clear()
        assert keys.holder(given) == want
        assert len(seen) == 3
