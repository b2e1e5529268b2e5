"""A page in headless Chromium (Qt's), in a program of its own: `python tests/browser.py PAGE.html PICTURE.png WIDTH`.

It prints as JSON what the page shows, what it asked for from elsewhere, and what its console said.
"""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
os.environ.setdefault("QTWEBENGINE_CHROMIUM_FLAGS", "--no-sandbox --disable-gpu")

from PySide6.QtCore import QTimer, QUrl
from PySide6.QtWebEngineCore import QWebEnginePage, QWebEngineProfile, QWebEngineUrlRequestInterceptor
from PySide6.QtWebEngineWidgets import QWebEngineView
from PySide6.QtWidgets import QApplication

HEIGHT = 900
SECONDS = 60  # after which a page that does not load counts as one that failed
PAINTED = 500  # milliseconds until what was loaded is drawn
SEEN = """JSON.stringify({
  title: document.title,
  headings: [...document.querySelectorAll('h1, h2')].map(one => one.innerText),
  text: document.body.innerText,
  pictures: [...document.images].map(one => [one.naturalWidth, one.naturalHeight, one.clientWidth]),
  cards: [...document.querySelectorAll('.card')].map(one => [one.className, one.innerText]),
  scripts: document.scripts.length,
  wider: document.documentElement.scrollWidth - document.documentElement.clientWidth
})"""


class Listener(QWebEngineUrlRequestInterceptor):
    """Notes every address that is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def interceptRequest(self, info) -> None:
        """Called by Qt for every request."""
        self.asked.append(info.requestUrl().toString())


class Page(QWebEnginePage):
    """A page that keeps what is said in its console."""

    said: list[str]

    def javaScriptConsoleMessage(self, level, message, line, source) -> None:
        """Called by Qt for every message."""
        self.said.append(message)


def main(path: str, picture: str, width: int) -> int:
    """Show the page, print what was found, and save a picture of it; 1 where it did not load."""
    application = QApplication(sys.argv[:1])
    profile, listener, view = QWebEngineProfile(), Listener(), QWebEngineView()
    profile.setUrlRequestInterceptor(listener)
    page = Page(profile, view)
    page.said = []
    view.setPage(page)
    view.resize(width, HEIGHT)
    address = QUrl.fromLocalFile(str(Path(path).resolve()))

    def seen(found: str) -> None:
        view.grab().save(picture)
        elsewhere = [one for one in listener.asked if one != address.toString() and not one.startswith("data:")]
        print(json.dumps({**json.loads(found), "elsewhere": elsewhere, "said": page.said}))
        application.exit(0)

    def loaded(ok: bool) -> None:
        if not ok:
            application.exit(1)
        QTimer.singleShot(PAINTED, lambda: page.runJavaScript(SEEN, 0, seen))

    page.loadFinished.connect(loaded)
    view.show()
    view.load(address)
    QTimer.singleShot(1000 * SECONDS, lambda: application.exit(1))
    return application.exec()


if __name__ == "__main__":
    sys.stdout.flush()
    code = main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    sys.stdout.flush()
    os._exit(code)  # Qt's own end may wait for processes that are gone
