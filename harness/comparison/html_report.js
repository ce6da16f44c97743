"use strict";

// Sorts the table by a column: numbers by their value, empty cells last; once more, the other way round.
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const heading = button.parentElement, column = Number(button.dataset.column);
    const descending = heading.getAttribute("aria-sort") === "ascending";
    for (const other of document.querySelectorAll("th")) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
    const body = document.querySelector("tbody");
    const keyed = [...body.rows].map((row) => ({ row, key: row.cells[column].dataset.value }));
    keyed.sort((one, other) => compare(one.key, other.key, descending));
    for (const { row } of keyed) body.append(row);
  });
}

function compare(one, other, descending) {
  if (one === undefined || other === undefined) return (one === undefined) - (other === undefined);
  const difference = Number(one) - Number(other);
  const order = Number.isNaN(difference) ? one.localeCompare(other, "en", { numeric: true }) : difference;
  return descending ? -order : order;
}

// Says that the table is wider than the window where it is.
const wide = document.querySelector(".wide"), more = document.querySelector("#more");
const tell = () => { more.hidden = wide.scrollWidth <= wide.clientWidth; };
addEventListener("resize", tell);
tell();

// Shows the curves whose boxes are ticked, in every chart.
for (const box of document.querySelectorAll("input[data-curve]")) {
  box.addEventListener("change", () => {
    for (const curve of document.querySelectorAll(`g[data-curve="${box.dataset.curve}"]`)) {
      curve.style.display = box.checked ? "" : "none";
    }
  });
}

// Shows the chart over the chosen axis.
for (const choice of document.querySelectorAll("input[name=axis]")) {
  choice.addEventListener("change", () => {
    for (const figure of document.querySelectorAll("figure")) figure.hidden = figure.dataset.axis !== choice.value;
  });
}
