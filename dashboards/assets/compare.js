// Which of the steps that differ most is drawn: a click on its row, or the arrow keys. It is in the address.
for (const radio of document.querySelectorAll("input[name=drawn]")) {
  radio.addEventListener("change", () => window.overlapscope.openAgain({step: radio.value}, {isNew: true}))
  radio.closest("tr").addEventListener("click", ({target}) => target.closest("a, input") || radio.click())
}
window.addEventListener("popstate", () => window.overlapscope.openAgain())
