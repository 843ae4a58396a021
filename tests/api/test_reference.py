"""The page `/docs`: the whole API, readable without a key, and nothing loaded from elsewhere."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from tests.api.conftest import request
from tests.api.fake import FakeGateway, FakeKeys


class Page(HTMLParser):
    """Its elements, once all that were opened are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.opened.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.opened.pop() == tag


def test_the_page_shows_every_route_and_body_and_needs_no_key(gateway: FakeGateway) -> None:
    document = request(gateway, "GET", "/openapi.json").json()
    gateway.keys = FakeKeys()
    response = request(gateway, "GET", "/docs")

    assert (response.status_code, response.headers["content-type"]) == (200, "text/html; charset=utf-8")
    page = Page(response.text)
    assert page.opened == []
    for path, methods in document["paths"].items():
        assert all(f"<code>{method.upper()} {path}</code>" in response.text for method in methods)
    names = {attributes["id"] for tag, attributes in page.tags if re.fullmatch("h[1-4]", tag)}
    links = [attributes["href"] or "" for tag, attributes in page.tags if tag == "a"]
    assert {link.removeprefix("#") for link in links if link != "/openapi.json"} <= names
    assert "chatbody" in names
    assert not re.search(r"[`|]|]\(", response.text), "Markdown that was not translated"


def test_the_page_loads_nothing(gateway: FakeGateway) -> None:
    response = request(gateway, "GET", "/docs")

    assert response.headers["content-security-policy"].startswith("default-src 'none'")
    assert {tag for tag, _ in Page(response.text).tags}.isdisjoint({"script", "img", "link", "iframe"})
