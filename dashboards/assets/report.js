// Prints all of a report: paper is light, and can't unfold anything.
document.addEventListener("DOMContentLoaded", () => {
  const root = document.documentElement
  let theme
  const paint = (name) => {
    root.dataset.theme = name
    window.overlapscope.paintPlots()
    for (const view of window.Bokeh?.index.roots ?? []) view.paint?.() // paper does not wait for the next frame
  }
  window.addEventListener("beforeprint", () => {
    document.querySelectorAll("details").forEach((each) => (each.open = true))
    theme = root.dataset.theme
    paint("light")
  })
  window.addEventListener("afterprint", () => paint(theme))
})
