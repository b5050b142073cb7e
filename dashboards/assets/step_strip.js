// Strip of all steps: marks the part of the recording in view, and moves the view by click or drag.
window.overlapscope.stepStrip = (fit, go) => {
  const strip = document.getElementById("strip")
  if (!strip) return {mark: () => {}}
  const length = () => fit()[1] - fit()[0]

  function timeAt(event) {
    const box = strip.getBoundingClientRect()
    return fit()[0] + (length() * (event.clientX - box.left)) / box.width
  }

  strip.addEventListener("pointerdown", (event) => {
    strip.setPointerCapture(event.pointerId)
    go(timeAt(event), true)
  })
  strip.addEventListener("pointermove", (event) => {
    if (strip.hasPointerCapture(event.pointerId)) go(timeAt(event), false)
  })

  return {
    mark(from, to) {
      const {style} = document.getElementById("window")
      style.left = `${(100 * (from - fit()[0])) / length()}%`
      style.width = `${(100 * (to - from)) / length()}%`
    },
  }
}
