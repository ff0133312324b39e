// While the job runs: the page loads itself again, and shows the reader the same place with the same claims open.
(() => {
  const EVERY = 10e3; // as often as the job writes the page
  const LATE = 600e3; // a page so old is of a job that was killed
  const KEPT = "largeprompt-place";
  const written = Date.parse(document.querySelector(".unfinished").dataset.written);
  const marks = page.all("section[id], article[id], tbody[id]");

  const keep = () => {
    const [place] = marks.filter((mark) => mark.getBoundingClientRect().top <= innerHeight / 4).slice(-1);
    const open = page.all("button.key[aria-expanded='true']").map((button) => button.closest("tbody").id);
    sessionStorage.setItem(KEPT, JSON.stringify({ id: place?.id, top: place?.getBoundingClientRect().top, open }));
  };
  const restore = () => {
    const { id, top, open } = JSON.parse(sessionStorage.getItem(KEPT) ?? "{}");
    sessionStorage.removeItem(KEPT);
    open?.forEach((claim) => document.getElementById(claim)?.querySelector("button.key[aria-expanded='false']")?.click());
    const place = id && document.getElementById(id);
    if (place && scrollY) scrollBy({ top: place.getBoundingClientRect().top - top, behavior: "instant" });
  };
  const again = () => {
    if (document.hidden || !getSelection().isCollapsed) return; // until it is looked at, and nothing is being copied
    try { keep(); } catch { /* a browser may refuse to keep anything for a file */ }
    location.reload();
  };

  addEventListener("load", () => { try { restore(); } catch { /* likewise */ } });
  if (Date.now() - written < LATE) setInterval(again, EVERY);
})();
