"""What people see of a running service, in a real browser.

The tests of keys come last, for once there was a key, the service requires one.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Browser, Page, expect

from hearth.control.keys import keys
from tests.service.harness import FORECAST_S, Service, eventually
from tests.web.conftest import LONG_NAME, MARKUP, PATIENCE_MS, NewPage, watching

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

PAGES = ["machine", "models", "requests", "decisions", "charts", "chat", "keys"]
SCHEMES: tuple[Literal["dark", "light"], ...] = ("dark", "light")
PHONE = {"width": 390, "height": 780}


def ask(service: Service, model: str = "alpha", **fields: object) -> str:
    """Return the id of an answered request."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8} | fields
    answer = service.http.post("/v1/chat/completions", json=body)
    assert answer.is_success, answer.text
    return answer.headers["x-hearth-request-id"]


def test_a_load_a_request_and_an_unload_are_seen_as_they_happen(page: Page, service: Service) -> None:
    service.unload("alpha", free=True)
    with watching(page, "machine"):
        expect(page.locator(".worker")).to_have_count(2)
        expect(page.locator(".resident")).to_have_count(0)
        ask(service)
        resident = page.locator(".resident", has_text="alpha")
        expect(resident.locator(".pill")).to_have_text("warm")
        expect(page.locator(".memory .part.is-weights[title^='alpha: Weights, active']")).to_be_visible()
        service.unload("alpha", free=True)
        expect(page.locator(".resident")).to_have_count(0)


def test_why_the_service_refuses_a_page_is_told(browser: Browser, service: Service) -> None:
    with browser.new_context() as context:
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.goto(service.url.replace("127.0.0.1", "other.localhost"))
        expect(page.get_by_text("without API keys, requests must be sent to localhost")).to_be_visible()


def test_requests_come_into_the_list_and_open_their_waterfall_by_keyboard(
    page: Page, service: Service
) -> None:
    with watching(page, "requests"):
        request_id = ask(service, "beta")
        row = page.locator(".row.is-selected, .row[role=option]").first
        expect(row).to_contain_text("beta")
        page.get_by_role("listbox", name="Requests").focus()
        page.keyboard.press("ArrowDown")
        drawer = page.locator(".drawer")
        expect(drawer).to_contain_text(request_id)
        for what in ("load", "prefill"):  # which may begin while the rest is loaded
            expect(drawer.locator(".span .what")).to_contain_text(["queue", what, "decode"])
        expect(drawer.locator(".options .is-chosen")).to_have_count(1)
        page.keyboard.press("Tab")
        expect(drawer.get_by_role("button", name="Close")).to_be_focused()
        page.keyboard.press("Escape")
        expect(drawer).to_have_count(0)
        expect(page.get_by_role("listbox", name="Requests")).to_be_focused()
        page.get_by_role("searchbox").fill("nothing is called so")
        expect(page.get_by_text("No request fits these filters.")).to_be_visible()


def test_a_model_is_loaded_stopped_and_pinned_by_hand(page: Page, service: Service) -> None:
    service.unload("alpha", free=True)
    with watching(page, "models/alpha"):
        state = page.locator(".row", has_text="alpha").locator(".pill")
        expect(state).to_have_text("stored")
        page.get_by_role("button", name="Load", exact=True).click()
        expect(state).to_have_text("warm")
        page.get_by_role("button", name="Pin", exact=True).click()
        expect(state).to_have_text("pinned")
        page.get_by_role("button", name="Unpin").click()
        expect(state).to_have_text("warm")
        page.get_by_role("button", name="Free").click()
        expect(state).to_have_text("stored")
        page.get_by_role("searchbox").fill("beta")
        expect(page.locator(".row[role=option]")).to_have_count(1)


def test_a_model_is_deployed_and_removed_which_another_page_sees(
    new_page: NewPage, service: Service, checkpoint: Path
) -> None:
    page, other = new_page(), new_page()
    with watching(page, "models"), watching(other, "models"):
        expect(other.locator(".row", has_text="alpha")).to_be_visible()
        page.get_by_role("button", name="Deploy a model").click()
        page.get_by_label("Source").fill(str(checkpoint))
        page.get_by_label("Name", exact=True).fill("gamma")
        page.get_by_label("Weights").select_option("int8")
        page.get_by_role("button", name="Deploy", exact=True).click()
        expect(page.get_by_text("gamma is deployed.")).to_be_visible()
        assert service.get("/hearth/models/gamma")["quant"] == "int8"
        expect(other.locator(".row", has_text="gamma")).to_be_visible()
        page.locator(".row", has_text="gamma").click()
        page.get_by_role("button", name="Remove").click()
        page.get_by_role("dialog").get_by_role("button", name="Remove").click()
        expect(page.get_by_text("gamma is removed.")).to_be_visible()
        for one in (page, other):
            expect(one.locator(".row", has_text="gamma")).to_have_count(0)
    assert "gamma" not in service.http.get("/v1/models").text


def test_a_deployment_that_fails_says_why(page: Page) -> None:
    with watching(page, "models"):
        page.get_by_role("button", name="Deploy a model").click()
        page.get_by_label("Source").fill("/no/where/<img src=x onerror=alert(1)>")
        page.get_by_role("button", name="Deploy", exact=True).click()
        expect(page.locator(".messages .is-error")).to_contain_text("<img src=x onerror=alert(1)>")


def test_a_killed_worker_is_seen_with_its_successor(page: Page, service: Service) -> None:
    ask(service)
    with watching(page, "decisions"):
        expect(page.locator(".decision").first).to_be_visible()
        service.worker_of("alpha").kill()
        expect(page.locator(".decision", has_text=re.compile(r"Worker w\S+ lost")).first).to_be_visible()
        page.keyboard.press("1")
        expect(page.locator(".worker", has_text="1 restart").locator(".pill").first).to_have_text("ready")
    service.wait_for_workers()


def test_a_decision_shows_the_workers_that_were_weighed(page: Page, service: Service) -> None:
    service.unload("alpha", free=True)
    with watching(page, "decisions"):
        ask(service)
        expect(page.locator(".decision", has_text="alpha ready on").first).to_be_visible()
        page.get_by_role("button", name="placement").click()
        first = page.locator(".decision").first
        expect(first).to_contain_text("Request for alpha")
        expect(first).to_contain_text("load alpha on")
        first.click()
        expect(page.locator(".drawer .options tbody tr")).to_have_count(2)
        page.locator(".drawer summary").click()
        assert json.loads(page.locator(".drawer pre").inner_text())["event"][0] == "RequestArrived"


def test_a_chat_shows_its_answer_and_its_own_start(new_page: NewPage, service: Service) -> None:
    service.unload("beta", free=True)
    page = new_page(permissions=["clipboard-read", "clipboard-write"])
    with watching(page, "chat/beta"):
        page.get_by_label("Max tokens").fill("5")
        page.get_by_label("Temperature").fill("0")
        page.get_by_role("textbox", name="Message", exact=True).fill("<b>Hi</b> it's me")
        page.keyboard.press("Enter")
        expect(page.locator(".turn.is-user")).to_have_text("<b>Hi</b> it's me")
        journey = page.locator(".turn.is-assistant .journey")
        expect(journey.locator("summary")).to_contain_text(re.compile("first token after .*cold"))
        expect(journey.locator("summary")).to_contain_text("5 tokens")
        expect(journey.locator(".what", has_text="load")).to_have_count(1)
        expect(page.get_by_text("stopped at the limit of tokens")).to_be_visible()

        page.get_by_role("button", name="Copy as curl").click()
        expect(page.get_by_text("Copied.")).to_be_visible()
        command = page.evaluate("navigator.clipboard.readText()")
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
        assert json.loads(done.stdout)["usage"]["completion_tokens"] == 5
        page.get_by_role("button", name="Copy as Python").click()
        compile(page.evaluate("navigator.clipboard.readText()"), "copied", "exec")


def test_text_of_others_is_shown_as_text(page: Page) -> None:
    with watching(page, "models/hostile"):
        expect(page.locator(".drawer")).to_contain_text(MARKUP)
        page.goto(f"/#chat/{MARKUP}")
        expect(page.locator("h1")).to_have_text("Chat")
        page.goto(f"/#requests/{MARKUP}")
        expect(page.locator(".drawer")).to_contain_text(f"no request has the id `{MARKUP}`")
        page.goto("/#requests/%")  # cannot be decoded
        expect(page.locator(".drawer")).to_contain_text("no request has the id `%`")
        assert page.locator("img").count() == 1  # the logo
    assert "hacked" not in page.title()


def test_every_page_fits_a_phone_in_both_themes(new_page: NewPage, service: Service) -> None:
    page = new_page(viewport=PHONE)
    ask(service, LONG_NAME)
    for name in [*PAGES, f"models/{LONG_NAME}", f"chat/{LONG_NAME}"]:
        with watching(page, name):
            expect(page.locator("h1")).to_have_text(name.partition("/")[0].capitalize())
            expect(page.locator("nav a[aria-current]")).to_be_in_viewport(ratio=1)
            expect(page.get_by_text("Loading …")).to_have_count(0)
            shades = []
            for scheme in SCHEMES:
                page.emulate_media(color_scheme=scheme)
                for part in ("documentElement", "querySelector('main')"):
                    assert page.evaluate(f"document.{part}.scrollWidth") <= PHONE["width"], name
                shade = page.evaluate("getComputedStyle(document.body).backgroundColor")
                shades.append(sum(map(int, re.findall(r"\d+", shade))))
            assert shades[0] < 200 <= shades[1]


def test_a_chosen_theme_stays(page: Page) -> None:
    with watching(page, "machine"):
        page.get_by_role("button", name="Theme: auto").click()
        page.get_by_role("button", name="Theme: light").click()
    page.reload()
    expect(page.get_by_role("button", name="Theme: dark")).to_be_visible()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_ten_thousand_requests_and_a_thousand_models_are_drawn_only_where_they_are_seen(
    page: Page, service: Service
) -> None:
    ask(service)
    with watching(page, "requests"):
        expect(page.locator(".row[role=option]").first).to_be_visible()
        page.evaluate("""async () => {
            const { live, changed } = await import("/web/live.js");
            const row = [...live.requests.values()].at(-1);
            for (let i = 0; i < 10000; i += 1)
                live.requests.set(`r${i}`, { ...row, request_id: `r${i}`, model: `m${i % 1000}` });
            changed();
        }""")
        expect(page.get_by_text(re.compile(r"10,0\d\d of"))).to_be_visible()
        assert page.locator(".row[role=option]").count() < 60
        page.get_by_role("listbox").focus()
        page.keyboard.press("End")
        expect(page.locator(".row.is-selected")).to_be_in_viewport()
        page.get_by_role("searchbox").fill("m999")
        expect(page.get_by_text(re.compile(r"^10 of"))).to_be_visible()


def test_charts_and_sums_follow_the_samples(page: Page, service: Service) -> None:
    ask(service)
    with watching(page, "charts"):
        expect(page.locator(".chart canvas")).to_have_count(8)
        expect(page.locator("section tr", has_text="alpha")).to_be_visible()


@pytest.mark.timeout(600)
def test_the_forecast_of_a_model_is_drawn(page: Page, service: Service) -> None:
    def is_made() -> bool:
        return bool(service.get("/hearth/forecasts/alpha")["forecast"])

    eventually("there is a forecast", is_made, patience_s=FORECAST_S)
    with watching(page, "models/alpha"):
        expect(page.locator(".drawer .chart")).to_contain_text("expected 12")
        expect(page.locator(".drawer")).to_contain_text("Method: last value")


def test_with_keys_the_page_asks_for_one_and_shows_what_it_may_see(
    new_page: NewPage, service: Service
) -> None:
    path = service.data_dir / "keys.json"
    admin, user = keys.add(path, "root", "admin").key, keys.add(path, "ann", "user").key
    page = new_page()
    page.goto("/")
    page.get_by_label("API key").fill("wrong")
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("alert")).to_contain_text("the API key is wrong")
    page.get_by_label("API key").fill(user)
    page.get_by_role("button", name="Log in").click()
    expect(page.locator("nav > a:not(.brand)")).to_have_text(["Models", "Requests", "Chat"])
    assert page.evaluate("document.cookie") == ""
    assert user not in page.evaluate(
        "JSON.stringify({...localStorage, ...sessionStorage, at: location.href})"
    )
    ask(service)  # by the operator
    page.goto("/#requests")
    expect(page.get_by_text("No requests yet.")).to_be_visible()
    page.goto("/#models/alpha")
    expect(page.locator(".row.is-selected")).to_have_text(re.compile("^alpha[0-9.]+ [KM]iB$"))  # no state
    expect(page.get_by_role("button", name="Load", exact=True)).to_be_visible()
    expect(page.get_by_role("button", name="Remove")).to_have_count(0)

    page.get_by_role("button", name="Log out").click()
    page.get_by_label("API key").fill(admin)
    page.keyboard.press("Enter")
    expect(page.locator("nav > a:not(.brand)")).to_have_count(len(PAGES))
    page.goto("/#keys")
    page.get_by_role("button", name="Make a key").click()
    page.get_by_label("Name", exact=True).fill("bob")
    page.get_by_label("Role").select_option("monitor")
    page.get_by_role("button", name="Make", exact=True).click()
    expect(page.get_by_role("dialog").locator("pre")).to_have_text(re.compile("^hearth-"))
    page.get_by_role("button", name="Done").click()
    expect(page.locator("tr", has_text="bob")).to_contain_text("monitor")
    page.locator("tr", has_text="ann").get_by_role("button", name="Remove").click()
    page.get_by_role("dialog").get_by_role("button", name="Remove").click()
    expect(page.locator("tr", has_text="ann")).to_have_count(0)


def test_a_page_whose_key_is_removed_asks_for_another(new_page: NewPage, service: Service) -> None:
    path = service.data_dir / "keys.json"
    key = keys.add(path, "eve", "monitor").key
    page = new_page()
    page.goto("/")
    page.get_by_label("API key").fill(key)
    page.keyboard.press("Enter")
    expect(page.locator(".worker")).to_have_count(2)
    keys.remove(path, "eve")
    expect(page.get_by_label("API key")).to_be_visible()
