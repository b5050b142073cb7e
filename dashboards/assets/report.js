// Functions of a report without a server: painting heatmaps, and printing everything.

// The heatmap of ranks and steps: a pixel per cell, in the shades of the theme.
window.overlapscope.paintMap = (canvas) => {
  const palettes = JSON.parse(document.getElementById("colors").textContent)
  const shades = Uint8Array.from(atob(canvas.dataset.shades), (letter) => letter.charCodeAt(0))
  const context = canvas.getContext("2d")
  const channel = (color, at) => Number.parseInt(color.slice(at, at + 2) || "ff", 16)
  return () => {
    const palette = palettes[document.documentElement.dataset.theme].lateness_palette
    const colors = palette.map((color) => [1, 3, 5, 7].map((at) => channel(color, at)))
    const picture = context.createImageData(canvas.width, canvas.height)
    shades.forEach((shade, cell) => picture.data.set(colors[shade], 4 * cell))
    context.putImageData(picture, 0, 0)
  }
}

document.addEventListener("DOMContentLoaded", () => {
  const root = document.documentElement
  const draws = Array.from(document.querySelectorAll("canvas[data-shades]"), window.overlapscope.paintMap)
  const drawAll = () => draws.forEach((draw) => draw())
  new MutationObserver(drawAll).observe(root, {attributeFilter: ["data-theme"]})
  drawAll()

  // Paper is light, and can't unfold anything.
  let theme
  window.addEventListener("beforeprint", () => {
    document.querySelectorAll("details").forEach((each) => (each.open = true))
    theme = root.dataset.theme
    root.dataset.theme = "light"
    drawAll()
  })
  window.addEventListener("afterprint", () => (root.dataset.theme = theme))
})
