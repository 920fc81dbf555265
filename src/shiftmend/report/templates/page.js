"use strict";
// The page reads well without this: it only sorts, hides and shows what is there already.
(function () {
  function show(element) { element.hidden = false; }

  document.querySelectorAll("[data-controls]").forEach(show);

  document.querySelectorAll("[data-toggle]").forEach(function (box) {
    box.addEventListener("change", function () {
      document.documentElement.classList.toggle("hide-" + box.dataset.toggle, !box.checked);
      document.querySelectorAll('[data-toggle="' + box.dataset.toggle + '"]').forEach(function (other) {
        other.checked = box.checked;
      });
    });
  });

  document.querySelectorAll("[data-sort]").forEach(function (button) {
    button.addEventListener("click", function () {
      const group = document.getElementById(button.dataset.group);
      const key = button.dataset.sort;
      const rows = Array.from(group.querySelectorAll("[data-row]"));
      const limit = Number(group.dataset.limit || rows.length);
      rows.sort(function (a, b) { return Number(b.dataset[key]) - Number(a.dataset[key]) || a.dataset.row - b.dataset.row; });
      rows.forEach(function (row, place) {
        row.parentNode.appendChild(row);
        row.hidden = place >= limit;
      });
      document.querySelectorAll('[data-group="' + button.dataset.group + '"]').forEach(function (other) {
        other.setAttribute("aria-pressed", String(other === button));
      });
    });
  });
})();
