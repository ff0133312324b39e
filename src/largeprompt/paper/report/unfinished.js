// While the job runs: the page keeps where the reader is and which claims are open, and loads itself again.
(() => {
  const EVERY = 10e3; // as often as the job writes the page
  const LATE = 600e3; // a page so old is of a job that was killed
  const written = Date.parse(document.querySelector(".unfinished").dataset.written);
  const marks = page.all("section[id], article[id], tbody[id]");

  const keep = () => {
    const [place] = marks.filter((mark) => mark.getBoundingClientRect().top <= innerHeight / 4).slice(-1);
    const open = page.all("button.key[aria-expanded='true']").map((button) => button.closest("tbody").id);
    sessionStorage.setItem(KEPT, JSON.stringify({ id: place?.id, top: place?.getBoundingClientRect().top, open }));
    history.scrollRestoration = "manual"; // or the browser goes to where the place was in pixels
  };
  const again = () => {
    if (document.hidden || !getSelection().isCollapsed) return; // until it is looked at, and nothing is being copied
    try { keep(); } catch { /* a browser may refuse to keep anything for a file */ }
    location.reload();
  };

  if (Date.now() - written < LATE) setInterval(again, EVERY);
})();
