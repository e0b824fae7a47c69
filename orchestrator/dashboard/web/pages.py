"""The pages: a skeleton each, filled by a module of its own from the JSON API."""

import hashlib
import re
from functools import cache
from pathlib import Path
from typing import Any

from flower.views import BaseHandler
from tornado import web
from tornado.template import Loader, Template

from stepfleet.orchestrator.dashboard.api.handling import Site
from stepfleet.orchestrator.dashboard.api.routes import PREFIX
from stepfleet.orchestrator.dashboard.tasks import with_link
from stepfleet.orchestrator.dashboard.web.live import Hub, Live

OWN = Path(__file__).parents[1]
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "font-src 'self'; connect-src 'self'; form-action 'self'; frame-ancestors 'none'; "
    "base-uri 'none'"
)
"""No script and no style but from files of this server."""
TABS = ("runs", "batches", "approvals", "fleet", "costs", "quarantine")
_TAB = """
        <li class="nav-item">
          <a class="nav-link{{% if active_tab == '{0}' %}} active{{% end %}}"
            {{% if active_tab == '{0}' %}}aria-current="page"{{% end %}}
            href="{{{{ reverse_url('{0}') }}}}">{1}</a>
        </li>"""
_IMPORT = re.compile(r'^import .* from "\./(\w+\.js)";$', re.MULTILINE)
_PAGES = {
    "/runs": ("runs", "runs"),
    "/runs/[^/]{1,200}": ("run", "runs"),
    "/batches": ("batches", "batches"),
    "/batches/[^/]{1,200}": ("batch", "batches"),
    "/approvals": ("approvals", "approvals"),
    "/fleet": ("fleet", "fleet"),
    "/costs": ("costs", "costs"),
}


class Templates(Loader):
    """Flower's templates and ours; our tabs come after Flower's own."""

    def _create_template(self, name: str) -> Template:
        own = OWN / "templates" / name
        text = own.read_bytes() if own.is_file() else (Path(self.root) / name).read_bytes()
        if name == "navbar.html":
            tabs = "".join(_TAB.format(tab, tab.capitalize()) for tab in TABS).encode()
            text = text.replace(b"\n      </ul>", tabs + b"\n      </ul>", 1)
        if name == "task.html":
            text = with_link(text)
        return Template(text, name=name, loader=self)


class Page(BaseHandler):
    """A page. Flower's own authentication guards it."""

    def initialize(self, template: str, tab: str) -> None:
        """Store which page it is."""
        self._template, self._tab = template, tab

    def set_default_headers(self) -> None:
        """Allow nothing but our own files, and no other site to frame the page."""
        super().set_default_headers()
        self.set_header("Content-Security-Policy", POLICY)
        self.set_header("Referrer-Policy", "same-origin")
        self.set_header("Cache-Control", "no-store")

    @web.authenticated
    def get(self) -> None:
        """Show the skeleton."""
        found = modules(self._template)
        self.render(f"{self._template}.html", active_tab=self._tab, modules=found)


class Assets(web.StaticFileHandler):
    """Styles and modules. Their address has their version, so browsers keep them for good."""

    def set_extra_headers(self, path: str) -> None:
        """Let browsers keep the file."""
        del path
        self.set_header("Cache-Control", "public, max-age=31536000, immutable")
        self.set_header("X-Content-Type-Options", "nosniff")


@cache
def modules(page: str) -> tuple[str, ...]:
    """Return the modules that a page runs, its own first: browsers load all of them at once."""
    found = [f"{page}.js"]
    for name in found:  # which grows by what its modules import
        text = (OWN / "static" / name).read_text(encoding="utf-8")
        found += [one for one in _IMPORT.findall(text) if one not in found]
    return tuple(found)


@cache
def version() -> str:
    """Return a name for the content of all files."""
    content = hashlib.sha256()
    for file in sorted((OWN / "static").iterdir()):
        content.update(file.name.encode() + b"\0" + file.read_bytes())
    return content.hexdigest()[:12]


def page_routes(site: Site) -> list[Any]:
    """Return the addresses of the pages, of their files, and of what keeps them up to date."""
    pages = [
        web.url(path, Page, {"template": template, "tab": tab}, name=template)
        for path, (template, tab) in _PAGES.items()
    ]
    assets = {"path": str(OWN / "static")}
    live = {"site": site, "hub": Hub(site)}
    return [
        *pages,
        web.url(rf"/stepfleet/{version()}/(.*)", Assets, assets, name="stepfleet"),
        web.url(f"{PREFIX}/live", Live, live),
    ]
