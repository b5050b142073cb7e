// Two points, which a drag or two clicks set: once asked to begin, or at once if the drag is one that `begins` it, as
// with Shift. pointAt: the point of an event. moved(first, last): as it goes. placed(first, last), stopped(): its end.
window.overlapscope.twoPoints = ({element, pointAt, begins = () => false, moved, placed, stopped = () => {}}) => {
  const DRAG_PX = 5
  let isPlacing = false
  let first = null
  let press = null

  function setPlacing(is) {
    isPlacing = is
    element.classList.toggle("measuring", is)
  }

  function stop() {
    const wasPlacing = isPlacing
    setPlacing(false)
    first = press = null
    if (wasPlacing) stopped()
  }

  function begin() {
    stop()
    setPlacing(true)
  }

  element.addEventListener("pointerdown", (event) => {
    if (event.button > 0) return
    const isDragOnly = !isPlacing && begins(event)
    if (isDragOnly) begin()
    if (!isPlacing) return
    event.stopPropagation() // it neither pans nor selects
    element.setPointerCapture(event.pointerId)
    press = {x: event.clientX, y: event.clientY, isFirst: !first, isDragOnly}
    first ??= pointAt(event)
    moved(first, pointAt(event))
  }, {capture: true})

  element.addEventListener("pointermove", (event) => {
    if (isPlacing && first) moved(first, pointAt(event))
  }, {capture: true})

  element.addEventListener("pointerup", (event) => {
    if (!isPlacing || !press) return
    event.stopPropagation()
    const isClick = Math.hypot(event.clientX - press.x, event.clientY - press.y) <= DRAG_PX
    if (isClick && press.isDragOnly) return stop()
    if (isClick && press.isFirst) return // the next click is the second point
    const points = [first, pointAt(event)]
    setPlacing(false)
    first = press = null
    placed(...points)
  }, {capture: true})

  // A drag with Shift would select text, and a press give the figure the focus.
  element.addEventListener("mousedown", (event) => isPlacing && event.preventDefault(), {capture: true})
  element.addEventListener("pointercancel", stop, {capture: true})

  return {begin, stop, isPlacing: () => isPlacing}
}
