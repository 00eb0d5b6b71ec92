"use strict";
// Tables sort by a column at a click on its head: down, up, as they came. What has no figure stays last.
for (const table of document.querySelectorAll("table.figures")) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  const asTheyCame = [...body.rows];
  if (asTheyCame.length < 2) continue;
  heads.forEach((head, column) => {
    const keys = new Map(asTheyCame.map((row, i) => [row, column ? row.cells[column].dataset.sort : String(-i)]));
    if (![...keys.values()].some((key) => key !== undefined)) return;
    const numeric = [...keys.values()].every((key) => key === undefined || !Number.isNaN(Number(key)));
    const compare = (a, b) => (numeric ? Number(a) - Number(b) : a < b ? -1 : a > b ? 1 : 0);
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const now = head.getAttribute("aria-sort");
      const next = now === "descending" ? "ascending" : now === "ascending" ? null : "descending";
      for (const other of heads) other.removeAttribute("aria-sort");
      const rows = [...asTheyCame];
      if (next !== null) {
        const sign = next === "descending" ? -1 : 1;
        head.setAttribute("aria-sort", next);
        rows.sort((a, b) => {
          const [left, right] = [keys.get(a), keys.get(b)];
          if (left === undefined || right === undefined) return (left === undefined) - (right === undefined);
          return sign * compare(left, right);
        });
      }
      body.append(...rows);
    });
  });
}
// Paper has no folds.
let unfolded = [];
addEventListener("beforeprint", () => {
  unfolded = [...document.querySelectorAll("details:not([open])")];
  for (const folded of unfolded) folded.open = true;
});
addEventListener("afterprint", () => {
  for (const folded of unfolded) folded.open = false;
});
