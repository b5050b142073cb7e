// Chooses which of the steps that differ most is drawn, by click or arrow keys, and keeps the choice in the address.
for (const radio of document.querySelectorAll("input[name=drawn]")) {
  radio.addEventListener("change", () => window.overlapscope.reloadInPlace({step: radio.value}, {isNew: true}))
  radio.closest("tr").addEventListener("click", ({target}) => target.closest("a, input") || radio.click())
}
window.addEventListener("popstate", () => window.overlapscope.reloadInPlace())
