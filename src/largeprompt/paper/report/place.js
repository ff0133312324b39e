// After a page of a job has loaded itself again, finished or not: the same place, with the same claims open.
const KEPT = "largeprompt-place";
addEventListener("load", () => {
  try {
    const kept = sessionStorage.getItem(KEPT);
    if (!kept) return;
    sessionStorage.removeItem(KEPT);
    const { id, top, open } = JSON.parse(kept);
    open.forEach((claim) => document.getElementById(claim)?.querySelector("button.key[aria-expanded='false']")?.click());
    const place = document.getElementById(id);
    if (place) scrollBy({ top: place.getBoundingClientRect().top - top, behavior: "instant" });
  } catch { /* a browser may refuse to keep anything for a file */ }
});
// Where a reader loads the page again, the browser itself goes back to the place
addEventListener("pagehide", () => {
  try { if (!sessionStorage.getItem(KEPT)) history.scrollRestoration = "auto"; } catch { /* likewise */ }
});
