"""Who gets an answer from the server, over HTTP and over websockets."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator

import pytest

from dashboards.access import MAX_WRONG_PASSWORDS, WRONG_PASSWORDS_PERIOD_S, Access
from dashboards.runs import RunIndex
from tests.dashboards.running import Answer, Running, running
from tests.synthetic import write_recording

TOKEN = "a token that nobody guesses"
PATHS = ("/", "/timeline", "/plots/order", "/static/js/bokeh.min.js", "/metadata", "/nothing/here", "/favicon.ico")
PATHS += ("/tables/steps.csv", "/runs/traces/-/tables/collectives.parquet")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> RunIndex:
    return RunIndex([write_recording(tmp_path_factory.mktemp("gate") / "traces", steps=3)])


@pytest.fixture(scope="module")
def unlocked(runs: RunIndex) -> Iterator[Running]:
    """A server that everybody who reaches it may use."""
    with running(runs) as server:
        yield server


@pytest.fixture(scope="module")
def locked(runs: RunIndex) -> Iterator[Running]:
    """A server that asks for a token."""
    with running(runs, Access(token=TOKEN)) as server:
        yield server


def logged_in(answer: Answer) -> str:
    """The cookie that an answer sets, to send it back."""
    return answer.headers["Set-Cookie"].partition(";")[0]


@pytest.mark.parametrize("host", ["localhost:{}", "127.0.0.1:{}", "[::1]:{}", "LOCALHOST:{}", "localhost:8888"])
def test_names_of_this_machine_are_answered_also_through_another_port(unlocked: Running, host: str) -> None:
    assert unlocked.get(Host=host.format(unlocked.port)).status == 200


@pytest.mark.parametrize("host", ["evil.example:{}", "localhost.evil.example", "10.0.0.7:{}", "[::1"])
def test_any_other_name_gets_nothing_whatever_it_asks_for(unlocked: Running, host: str) -> None:
    for path in PATHS:
        answer = unlocked.get(path, Host=host.format(unlocked.port))
        assert answer.status == 403
        assert "answers to localhost" in answer.text
        assert "GPT" not in answer.text


def test_a_name_that_is_refused_is_shown_as_text(unlocked: Running) -> None:
    assert "<script>x" not in unlocked.get(Host="<script>x</script>").text


def test_a_name_that_is_allowed_is_answered(runs: RunIndex) -> None:
    with running(runs, Access(hosts=["Lab.Example"])) as server:
        assert server.get(Host="lab.example").status == 200
        assert server.open_socket(Host="127.0.0.1:5006", Origin="https://lab.example") == 101
        assert server.get(Host="evil.example").status == 403


def test_websockets_are_opened_by_pages_of_this_server_alone(unlocked: Running) -> None:
    own = f"localhost:{unlocked.port}"
    assert unlocked.open_socket(Host=own, Origin=f"http://{own}") == 101
    assert unlocked.open_socket(Host=own, Origin="http://evil.example") == 403
    assert unlocked.open_socket(Host=own, Origin="http://localhost:3000") == 403
    assert unlocked.open_socket(Host="evil.example", Origin="http://evil.example") == 403
    assert unlocked.open_socket("/timeline/ws", Host=own, Origin="null") == 403


def test_with_a_token_nothing_is_answered_without_it(locked: Running) -> None:
    for path in PATHS:
        answer = locked.get(path)
        assert answer.status == 403
        assert "asks for a token" in answer.text
        assert "GPT" not in answer.text
    own = f"localhost:{locked.port}"
    assert locked.open_socket(Host=own, Origin=f"http://{own}") == 403
    assert locked.open_socket(Host=own) == 403
    assert locked.get("/?token=wrong").status == 403


def test_the_token_lets_in_is_taken_from_the_address_and_remembered(locked: Running) -> None:
    answer = locked.get(f"/timeline?step=2&token={TOKEN.replace(' ', '+')}")
    assert (answer.status, answer.headers["Location"]) == (303, "./timeline?step=2")
    assert TOKEN not in str(answer.headers)
    assert "httponly" in answer.headers["Set-Cookie"].lower()
    cookie = logged_in(answer)
    own = f"localhost:{locked.port}"
    page = locked.get("/timeline?step=2", Cookie=cookie)
    assert page.status == 200
    assert locked.open_socket(Host=own, Origin=f"http://{own}", Cookie=cookie) == 101
    assert locked.open_socket(Host=own, Origin="http://evil.example", Cookie=cookie) == 403
    assert locked.get("/?token=old", Cookie=cookie).headers["Location"] == "./"


def test_pages_do_not_contain_the_cookie(locked: Running) -> None:
    cookie = logged_in(locked.get(f"/?token={TOKEN.replace(' ', '+')}"))
    page = locked.get("/", Cookie=cookie).text
    session = re.search(r'"token":"([\w-]+)', page)
    assert session is not None
    payload = base64.urlsafe_b64decode(session[1] + "===")
    assert b"session_id" in payload
    for secret in (cookie.partition("=")[2], cookie.partition("=")[0]):
        assert secret not in page
        assert secret.encode() not in payload


def test_a_cookie_that_was_tampered_with_lets_nobody_in(locked: Running) -> None:
    cookie = logged_in(locked.get(f"/?token={TOKEN.replace(' ', '+')}"))
    assert locked.get("/", Cookie=cookie[:-1] + ("0" if cookie[-1] != "0" else "1")).status == 403
    name = cookie.partition("=")[0]
    assert locked.get("/", Cookie=f"{name}=admitted").status == 403


def test_the_token_can_be_typed_in(locked: Running) -> None:
    form = {"Content_Type": "application/x-www-form-urlencoded"}
    answer = locked.get("/order?number=3", method="POST", body=f"token={TOKEN}", **form)
    assert (answer.status, answer.headers["Location"]) == (303, "./order?number=3")
    wrong = locked.get("/order", method="POST", body="token=guessed", **form)
    assert wrong.status == 403
    assert 'class="wrong"' in wrong.text


def test_the_way_on_stays_on_this_server(locked: Running) -> None:
    token = TOKEN.replace(" ", "+")
    for path in ("/https:evil.example", "//evil.example/", "/x//evil.example"):
        location = locked.get(f"{path}?token={token}").headers["Location"]
        assert location.startswith("./")


def test_who_has_logged_in_stays_so_when_the_server_is_started_again_with_its_token(runs: RunIndex) -> None:
    with running(runs, Access(token=TOKEN)) as before:
        cookie = logged_in(before.get(f"/?token={TOKEN.replace(' ', '+')}"))
    with running(runs, Access(token=TOKEN)) as after:
        assert after.get("/", Cookie=cookie).status == 200
    with running(runs, Access(token=TOKEN + "x")) as other:
        assert other.get("/", Cookie=cookie).status == 403


def test_a_name_and_password_let_in(runs: RunIndex) -> None:
    form = {"Content_Type": "application/x-www-form-urlencoded"}
    with running(runs, Access(passwords={"ada": "difference"})) as server:
        for wrong in ("user=ada&password=engine", "user=&password=", "user=bob&password=difference", "token="):
            assert server.get("/plots/order", method="POST", body=wrong, **form).status == 403
        answer = server.get("/plots/order", method="POST", body="user=ada&password=difference", **form)
        assert answer.headers["Location"] == "./order"
        assert server.get("/plots/order", Cookie=logged_in(answer)).status == 200


def test_a_user_whose_password_is_guessed_has_to_wait_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr("dashboards.access.time.monotonic", lambda: now_s)
    access = Access(passwords={"ada": "difference", "bob": "builder"})
    guesses = [access.is_valid_login(user="ada", password=f"guess {number}") for number in range(MAX_WRONG_PASSWORDS)]
    assert not any(guesses)
    assert not access.is_valid_login(user="ada", password="difference")
    assert access.is_valid_login(user="bob", password="builder")
    now_s += WRONG_PASSWORDS_PERIOD_S
    assert access.is_valid_login(user="ada", password="difference")


def test_browsers_are_told_to_load_and_to_run_nothing_of_others(unlocked: Running) -> None:
    for path in PATHS:
        headers = unlocked.get(path).headers
        policy = dict(each.strip().split(" ", 1) for each in headers["Content-Security-Policy"].split(";"))
        assert not re.search(r"https?:|\*", policy["default-src"])
        assert ("frame-ancestors" in policy) == (not path.startswith("/plots/"))
        assert headers["X-Content-Type-Options"] == "nosniff"


def test_behind_a_prefix_every_page_and_its_script_are_below_it(runs: RunIndex) -> None:
    with running(runs, prefix="runs/mine/") as server:
        assert server.get("/runs/mine").headers["Location"] == "/runs/mine/"
        page = server.get("/runs/mine/timeline")
        assert page.status == 200
        assert 'src="static/js/bokeh.min.js"' in page.text
        assert server.get("/runs/mine/static/js/bokeh.min.js").status == 200
        own = f"localhost:{server.port}"
        assert server.open_socket("/runs/mine/timeline/ws", Host=own, Origin=f"http://{own}") == 101
        elsewhere = server.get("/timeline")
        assert elsewhere.status == 404
        assert '<a href="/runs/mine/">' in elsewhere.text


def test_where_nothing_is_a_page_says_so_and_leads_to_the_first(unlocked: Running) -> None:
    for path, first in (("/nothing/at/all", "../../"), ("/nothing", "./"), ("/runs/other/timelines", "../../")):
        answer = unlocked.get(path)
        assert answer.status == 404
        assert f"Nothing is at {path}." in answer.text
        assert f'<a href="{first}">' in answer.text
    assert "<script>x" not in unlocked.get("/<script>x").text
